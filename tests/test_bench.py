import time

import pytest
import torch

from devtools import benchmark_report
from devtools.benchmarking import OURS, QUICK, Case, Effort, alternate, measure

EFFORT = Effort(rounds=7, sample_seconds=1e-4, case_seconds=0.2)


def case(correct: bool = True, **changes) -> Case:
    x = torch.ones(1 << 12)
    settings = {
        "op": "copy",
        "shape": "4096",
        "dtype": torch.float32,
        "ours": x.clone,
        "peers": {"twice": lambda: (x.clone(), x.clone())},
        "check": lambda: correct,
        "bytes": 2 * x.nbytes,
    }
    return Case(**settings | changes)


def test_times_are_those_of_the_calls():
    times = alternate({"short": lambda: time.sleep(1e-3), "long": lambda: time.sleep(3e-3)}, EFFORT)
    assert min(times["short"]) >= 1e-3
    assert min(times["long"]) >= 3e-3
    assert len(times["short"]) == len(times["long"]) == 7


def test_contenders_take_turns():
    order = []
    alternate({name: lambda name=name: order.append(name) or time.sleep(1e-3) for name in "ab"}, EFFORT)
    assert order[-6:] == list("ababab")


def test_result_is_complete():
    result = measure(case(), QUICK)
    assert result.correct
    assert set(result.seconds) == {OURS, "twice"}
    assert 1 < result.ratios["twice"] < 4
    assert result.share > 0
    assert result.rate.endswith("GB/s")


def test_products_are_compared_with_the_product_ceiling():
    x = torch.ones(256, 256)
    result = measure(case(ours=lambda: x @ x, bytes=3 * x.nbytes, flops=2 * 256**3, peers={}), QUICK)
    assert result.rate.endswith("GFLOP/s")


def test_wrong_kernel_gets_no_number(tmp_path):
    result = measure(case(correct=False), QUICK)
    assert not result.correct
    assert "WRONG" in benchmark_report.cells(result)
    benchmark_report.save(tmp_path, [result])


def test_saved_files(tmp_path):
    written = benchmark_report.save(tmp_path, [measure(case(), QUICK)])
    assert sorted(path.suffix for path in written) == [".json", ".md", ".png"]
    assert all(path.stat().st_size for path in written)
    markdown = next(path for path in written if path.suffix == ".md").read_text()
    assert "| copy | 4096 | float32 | forward | 1 |" in markdown
    assert torch.__version__ in markdown


@pytest.fixture(autouse=True)
def restore_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
