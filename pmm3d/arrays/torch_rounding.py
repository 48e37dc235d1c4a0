"""torch's rounding of float32 factors: a setting of the process, which is held at a value during the call of a GEMM.

torch.set_float32_matmul_precision changes the setting too. float32 would then silently become tf32 or bfloat16.
"""

from __future__ import annotations

import threading
from typing import Any

EXACT, TF32 = "ieee", "tf32"
UNSET = "none"
"""torch's value before the setting is changed; it means EXACT."""


class Rounding:
    """One of torch's settings `fp32_precision`, as a lock that is shared by threads with the same value.

    Threads that need another value wait until all holders have released the setting. The last holder restores the
    previous value, unless the user has changed the setting in the meantime.

        >>> from types import SimpleNamespace
        >>> setting, rounding = SimpleNamespace(fp32_precision="bf16"), Rounding()
        >>> rounding.hold(setting, EXACT), setting.fp32_precision
        (None, 'ieee')
        >>> rounding.release(setting), setting.fp32_precision
        (None, 'bf16')
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holders, self._value, self._before = 0, EXACT, EXACT

    def is_exact(self, setting: Any) -> bool:
        """Whether the setting is exact and no thread holds it."""
        return not self._holders and setting.fp32_precision in (UNSET, EXACT)

    def hold(self, setting: Any, value: str) -> None:
        """Set the value until the caller calls `release`. Wait while threads hold another value."""
        with self._changed:
            self._changed.wait_for(lambda: not self._holders or self._value == value)
            if not self._holders:
                current = setting.fp32_precision
                fits = current == value or (current, value) == (UNSET, EXACT)
                if not fits:
                    setting.fp32_precision = value
                self._value, self._before = value, value if fits else current
            self._holders += 1

    def release(self, setting: Any) -> None:
        with self._changed:
            self._holders -= 1
            if self._holders:
                return
            try:
                if self._before != self._value == setting.fp32_precision:
                    setting.fp32_precision = self._before
            finally:
                self._changed.notify_all()

    def of_user(self, setting: Any) -> str:
        """Return the value of the setting without the holders."""
        with self._changed:
            return str(self._before if self._holders else setting.fp32_precision)


ON_HOST, ON_DEVICE = Rounding(), Rounding()
