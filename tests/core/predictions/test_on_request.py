"""`ResultsOnRequest`: one computation, at the first question."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from e2ip_plugins.errors import InputError
from e2ip_plugins.predictions.ase_properties import CalculatorResults
from e2ip_plugins.predictions.on_request import ResultsOnRequest, is_on_request

OURS = {"e2ip_nu": 8.0, "uq_family": "niw"}


@pytest.fixture
def calls():
    return []


@pytest.fixture
def make(calls):
    """Function that makes results whose computations are counted."""

    def of(kind=dict, results=None):
        return ResultsOnRequest(
            {"energy": 1.0} if results is None else results, lambda: calls.append(1) or OURS, ["e2ip_nu"], kind
        )

    return of


@pytest.mark.parametrize("kind", [dict, CalculatorResults])
def test_names_of_others_compute_nothing(make, calls, kind):
    results = make(kind)
    assert results["energy"] == results.get("energy") == 1.0 and "stress" not in results
    assert results.get("stress") is None and not calls
    with pytest.raises(KeyError, match="stress"):
        results["stress"]
    assert results.pending and not calls
    assert results["uq_family"] == "niw" and results["e2ip_nu"] == 8.0 and calls == [1]
    complete = kind({"energy": 1.0, **OURS})
    assert results == complete and [*results] == [*complete] and type(results.copy()) is kind
    assert results.copy()["uq_family"] == "niw"


def test_a_changed_result_stays_changed(make):
    results = make()
    results["e2ip_nu"] = 1.0
    results.update(energy=2.0)
    assert dict(results) == {"energy": 2.0, "e2ip_nu": 1.0, "uq_family": "niw"}
    results = make()
    del results["e2ip_nu"]
    assert "e2ip_nu" not in results and results.get("e2ip_nu") is None
    with pytest.raises(KeyError, match="e2ip_nu"):
        results["e2ip_nu"]
    assert (make() | {"energy": 3.0})["energy"] == 3.0 and ({"energy": 3.0} | make())["e2ip_nu"] == 8.0


def test_an_error_is_raised_at_every_question(calls):
    def fail():
        calls.append(1)
        raise RuntimeError("out of memory")

    results = ResultsOnRequest({"energy": 1.0}, fail, ["e2ip_nu"])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            results["e2ip_nu"]
    assert calls == [1, 1] and results["energy"] == 1.0


def test_threads_compute_once(calls):
    together = threading.Barrier(4)
    results = ResultsOnRequest({}, lambda: calls.append(1) or OURS, ["e2ip_nu"])

    def ask(_):
        together.wait()
        return results["e2ip_nu"]

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(ask, range(4))] == [8.0] * 4
    assert calls == [1]


def test_the_option():
    assert is_on_request("on request") and not is_on_request("always")
    with pytest.raises(InputError, match="uncertainties=True: choose 'always' or 'on request'"):
        is_on_request(True)
