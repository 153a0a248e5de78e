"""The lock that threads take which share an ASE calculator."""

import threading
from typing import Tuple, Type


class CalculatorLock:
    """A lock of one calculator: a copied or unpickled calculator gets one of its own."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> Tuple[Type["CalculatorLock"], Tuple[()]]:
        return CalculatorLock, ()
