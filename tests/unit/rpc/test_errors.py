import numpy as np
import pytest

from freshet.errors import (
    BadInput,
    Corrupt,
    DataLost,
    Fenced,
    FreshetError,
    Mismatch,
    Overloaded,
    Refused,
    TooLarge,
    Unavailable,
)
from freshet.rpc.errors import failure_frame, failure_of
from freshet.rpc.frames import BadFrame, Frame, Kind, Part, decode_frame

FAMILIES = [Unavailable, Fenced, Mismatch, Corrupt, TooLarge, BadInput, DataLost, FreshetError]


def told(error):
    """The error as the other side gets it."""
    frame = decode_frame(failure_frame(error, 9), max_bytes=1 << 20)
    assert (frame.kind, frame.id) == (Kind.FAILURE, 9)
    return failure_of(frame)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_error_arrives_as_its_family(family):
    error = told(family("why it was, in ünicode"))
    assert (type(error), str(error)) == (family, "why it was, in ünicode")


def test_a_refusal_has_the_applied_offsets():
    error = told(Refused("does not continue", {3: 7, 0: 2**40}))
    assert isinstance(error, Refused)
    assert error.applied == {3: 7, 0: 2**40}


def test_an_overload_says_when_to_try_again():
    error = told(Overloaded("full", 0.25))
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 0.25


def test_subclasses_arrive_as_families_and_defects_as_errors():
    assert type(told(BadFrame("cut", "truncated"))) is Corrupt
    assert str(told(KeyError("x"))) == "'x'"
    assert type(told(KeyError("x"))) is FreshetError


@pytest.mark.parametrize("wait", [float("nan"), -1.0, 1e9])
def test_a_wait_that_makes_no_sense_is_replaced(wait):
    sections = {(Part.TEXT, 0): np.zeros(0, np.uint8), (Part.REALS, 0): np.array([wait])}
    error = failure_of(Frame(Kind.FAILURE, flags=2, sections=sections))
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 1.0


def test_an_unknown_family_is_refused():
    with pytest.raises(BadFrame, match="found 77: hm"):
        failure_of(Frame(Kind.FAILURE, flags=77, sections={(Part.TEXT, 0): np.frombuffer(b"hm", np.uint8)}))
