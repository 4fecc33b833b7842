"""What a call costs, counted: the same on every machine, whatever else that does."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_steps(call: Callable[[], Any]) -> int:
    """Count the lines of Python that a call runs."""
    steps = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal steps
        steps += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return steps
