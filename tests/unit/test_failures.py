"""An interrupt is known for one, whatever a library made of it."""

from __future__ import annotations

from flows.failures import is_interrupt


def _raised(inner: BaseException, outer: Exception, linked: bool) -> BaseException:
    try:
        try:
            raise inner
        except BaseException as error:
            raise outer from (error if linked else None)
    except BaseException as error:
        return error


def test_an_interrupt_is_found_behind_another_error() -> None:
    assert is_interrupt(KeyboardInterrupt())
    for linked in (True, False):
        assert is_interrupt(_raised(KeyboardInterrupt(), ValueError("Task run is not set"), linked))
        assert not is_interrupt(_raised(OSError(), ValueError("x"), linked))
    assert not is_interrupt(None)


def test_an_error_that_is_its_own_cause_has_an_end() -> None:
    error = ValueError("x")
    error.__cause__ = error
    assert not is_interrupt(error)
