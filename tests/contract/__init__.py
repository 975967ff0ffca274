"""What every rollout engine and every trainer engine owes, whatever it is made of."""
