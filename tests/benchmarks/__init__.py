"""Programs that produce reported figures; nothing here is collected by pytest."""
