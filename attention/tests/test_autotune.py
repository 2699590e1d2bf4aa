"""autotune and attention_plan: what is measured and when, what is kept, and what is said of it."""

import json
import threading
import warnings

import pytest
import torch
from conftest import assert_bits_equal
from operations import BF16, CAUSAL, EVERYTHING, F32, PLAIN, Shape, by_dtype, for_each

pytestmark = [pytest.mark.small, pytest.mark.isa_independent]

UNIT, FALLBACK = "flash_unit", "fallback"


@pytest.fixture
def tune(kernel, monkeypatch):
    """Puts a fresh tuner in place, whose clock says what it is told; returns the names it was asked to time."""

    def install(setting="on", seconds=None):
        asked = []

        def measure(calls):
            asked.append([strategy.value for strategy in calls])
            for function in calls.values():
                function()
            return [(seconds or {}).get(strategy.value, 1.0) for strategy in calls]

        monkeypatch.setattr(kernel._autotune, "TUNER", kernel._autotune.Tuner(setting, measure))
        return asked

    return install


def run(kernel, inputs, **options):
    return kernel.attention(**inputs, **options)


@by_dtype
def test_the_fastest_runs(kernel, device, tune, dtype):
    inputs = CAUSAL.inputs(dtype=dtype, device=device)
    options = kernel.AttentionOptions(is_causal=True)
    for winner in (UNIT, FALLBACK):
        asked = tune(seconds={winner: 0.5})
        for _ in range(3):
            output = run(kernel, inputs, options=options)
        assert len(asked) == 1
        assert {UNIT, FALLBACK} <= set(asked[0])
        assert_bits_equal(output, run(kernel, inputs, options=options, strategy=winner))
        plan = kernel.attention_plan(**inputs, options=options)
        assert plan.strategy == winner
        assert "500 ms" in plan.reasons[UNIT if winner == FALLBACK else FALLBACK]
        assert len(asked) == 1


def test_with_a_gradient_it_is_measured_with_the_backward(kernel, device, tune):
    asked = tune()
    inputs = EVERYTHING.inputs(device=device)
    options = kernel.AttentionOptions(**EVERYTHING.options)
    run(kernel, inputs, options=options)
    trained = {name: t.clone().requires_grad_(t.is_floating_point()) for name, t in inputs.items()}
    output = run(kernel, trained, options=options)
    assert len(asked) == 2
    output.sum().backward()
    with torch.no_grad():
        run(kernel, trained, options=options)
    assert len(asked) == 2


def test_one_measurement_for_a_kind_of_call(kernel, device, tune):
    """Lengths and batches count by the next power of two, all else exactly."""
    asked = tune()

    def attend(keys, width=16, batch=2, **options):
        inputs = PLAIN.inputs(Shape(batch, 2, 1, 1, keys, width, 16), device=device)
        run(kernel, inputs, options=kernel.AttentionOptions(**options))
        return len(asked)

    assert attend(33) == 1
    assert [attend(keys) for keys in (34, 50, 64)] == [1, 1, 1]
    assert attend(65) == 2
    assert attend(65, batch=3) == 3
    assert attend(65, width=17) == 4
    assert attend(65, is_causal=True) == 5
    assert attend(65, softcap=3.0) == 6
    assert attend(65, softcap=4.0, scale=0.3) == 6
    assert attend(65, window=(7, 7)) == 7


@for_each(PLAIN, EVERYTHING)
def test_off_takes_the_rule(kernel, device, tune, variant):
    asked = tune("off")
    inputs = variant.inputs(dtype=BF16, device=device)
    options = kernel.AttentionOptions(**variant.options)
    plan = kernel.attention_plan(**inputs, options=options)
    assert plan.strategy == kernel._strategies.serving(BF16, torch.device(device))[0]
    assert plan.strategy != FALLBACK
    assert_bits_equal(
        run(kernel, inputs, options=options), run(kernel, inputs, options=options, strategy=plan.strategy)
    )
    assert not asked


def test_nothing_is_measured_while_tracing(kernel, device, tune):
    asked = tune()
    inputs = PLAIN.inputs(device=device)
    torch._dynamo.reset()

    def attend(query, key, value):
        return kernel.attention(query, key, value)

    torch.compile(attend, fullgraph=True, backend="eager")(*inputs.values())
    torch.fx.experimental.proxy_tensor.make_fx(attend)(*inputs.values())
    with torch._subclasses.fake_tensor.FakeTensorMode() as mode:
        run(kernel, {name: mode.from_tensor(tensor) for name, tensor in inputs.items()})
    run(kernel, {name: tensor.to("meta") for name, tensor in inputs.items()})
    torch.vmap(attend)(*(tensor[None] for tensor in inputs.values()))
    assert not asked


def test_nothing_is_measured_without_elements(kernel, device, tune):
    asked = tune()
    run(kernel, PLAIN.inputs(Shape(0, 2, 1, 3, 3, 8, 8), device=device))
    assert not asked


def test_arguments_are_refused_before_anything_is_measured(kernel, device, tune):
    asked = tune()
    inputs = PLAIN.inputs(device=device)
    with pytest.raises(kernel.AttentionSetupError):
        run(kernel, {**inputs, "value": inputs["value"][:, :1]})
    assert not asked


def test_a_large_score_matrix_is_no_candidate(kernel, device, tune, monkeypatch):
    monkeypatch.setattr(kernel._autotune, "LARGEST_MEASURED_FALLBACK", 2 * 4 * 5 * 7 - 1)
    asked = tune()
    inputs = PLAIN.inputs(dtype=BF16, device=device)
    plan = kernel.attention_plan(**inputs)
    assert all(FALLBACK not in names for names in asked)
    assert plan.strategy != FALLBACK
    assert plan.reasons[FALLBACK]


def test_threads_that_ask_at_once_wait_for_one_measurement(kernel, device, tune):
    asked = tune()
    inputs = PLAIN.inputs(device=device)
    barrier, outputs = threading.Barrier(8), []

    def ask():
        barrier.wait()
        outputs.append(run(kernel, inputs))

    workers = [threading.Thread(target=ask) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(asked) == 1
    assert len(outputs) == 8
    for output in outputs[1:]:
        assert_bits_equal(output, outputs[0])


def test_a_real_measurement(kernel, device, monkeypatch):
    monkeypatch.setattr(kernel._autotune, "TUNER", kernel._autotune.Tuner("on", kernel._autotune.measure))
    inputs = PLAIN.inputs(device=device)
    plan = kernel.attention_plan(**inputs)
    assert " ms where " in plan.reasons[UNIT if plan.strategy == FALLBACK else FALLBACK]
    assert_bits_equal(run(kernel, inputs), run(kernel, inputs, strategy=plan.strategy))


def test_a_file_keeps_the_winners(kernel, device, tune, tmp_path):
    path = tmp_path / "winners.json"
    inputs = PLAIN.inputs(device=device)
    asked = tune(str(path), {FALLBACK: 0.5})
    run(kernel, inputs)
    assert len(asked) == 1
    kept = json.loads(path.read_text())["winners"]
    assert list(kept.values()) == [FALLBACK]
    # As another process would find it.
    asked = tune(str(path), {UNIT: 0.5})
    assert kernel.attention_plan(**inputs).strategy == FALLBACK
    assert not asked
    run(kernel, PLAIN.inputs(Shape(1, 1, 1, 9, 9, 8, 8), device=device))
    assert sorted(json.loads(path.read_text())["winners"].values()) == [FALLBACK, UNIT]
    assert [each.name for each in tmp_path.iterdir()] == ["winners.json"]


def test_what_others_wrote_meanwhile_stays(kernel, device, tune, tmp_path):
    path = tmp_path / "winners.json"
    tune(str(path))
    run(kernel, PLAIN.inputs(device=device))
    content = json.loads(path.read_text())
    content["winners"]["of another process"] = UNIT
    path.write_text(json.dumps(content))
    run(kernel, PLAIN.inputs(Shape(1, 1, 1, 9, 9, 8, 8), device=device))
    assert len(json.loads(path.read_text())["winners"]) == 3


CORRUPT = {
    "empty": "",
    "half": '{"format": "rudnn-attention autotune 1", "winn',
    "other_json": "[1, 2]",
    "other_format": '{"format": "something", "winners": {}}',
    "other_winners": '{"format": "rudnn-attention autotune 1", "winners": {"a": 1}}',
    "binary": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("content", CORRUPT.values(), ids=CORRUPT)
def test_a_corrupt_file_is_written_anew(kernel, device, tune, tmp_path, content):
    path = tmp_path / "winners.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    asked = tune(str(path))
    inputs = PLAIN.inputs(device=device)
    with pytest.warns(UserWarning, match="RUDNN_AUTOTUNE"):
        run(kernel, inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(kernel, PLAIN.inputs(Shape(1, 1, 1, 9, 9, 8, 8), device=device))
    assert len(asked) == 2
    assert len(json.loads(path.read_text())["winners"]) == 2


def test_a_winner_that_cannot_serve_is_not_taken(kernel, device, tune, tmp_path):
    path = tmp_path / "winners.json"
    inputs = PLAIN.inputs(dtype=F32, device=device)
    tune(str(path))
    run(kernel, inputs)
    for name in ("flash_accelerated", "autotune", "nonsense"):
        content = json.loads(path.read_text())
        content["winners"] = dict.fromkeys(content["winners"], name)
        path.write_text(json.dumps(content))
        asked = tune(str(path))
        run(kernel, inputs)
        assert len(asked) == 1


@pytest.mark.parametrize("where", ["missing", "file"])
def test_a_place_that_cannot_be_written(kernel, device, tune, tmp_path, where):
    """As a read-only directory, which would not stop root: the call goes on, and one warning says so."""
    if where == "file":
        (tmp_path / "file").write_text("")
    asked = tune(str(tmp_path / where / "winners.json"))
    with pytest.warns(UserWarning, match="RUDNN_AUTOTUNE") as caught:
        for keys in (7, 33):
            run(kernel, PLAIN.inputs(Shape(1, 1, 1, 9, keys, 8, 8), device=device))
    assert len(caught) == 1
    assert len(asked) == 2


def test_a_read_only_directory(kernel, device, tune, tmp_path, monkeypatch):
    """Also for root, whom permissions do not stop."""

    def refuse(*arguments, **options):
        raise PermissionError("read-only")

    monkeypatch.setattr(kernel._autotune.tempfile, "mkstemp", refuse)
    asked = tune(str(tmp_path / "winners.json"))
    with pytest.warns(UserWarning, match="cannot be written"):
        run(kernel, PLAIN.inputs(device=device))
    run(kernel, PLAIN.inputs(device=device))
    assert len(asked) == 1


@by_dtype
@pytest.mark.parametrize("strategy", [UNIT, FALLBACK])
def test_the_plan_of_a_named_strategy(kernel, device, dtype, strategy):
    plan = kernel.attention_plan(**PLAIN.inputs(dtype=dtype, device=device), strategy=strategy)
    assert plan.strategy is kernel.AttentionStrategy(strategy)
    assert set(plan.reasons) == {"flash_accelerated", UNIT, FALLBACK} - {strategy}
    assert all(reason == f"{strategy} was asked for" for reason in plan.reasons.values())


def test_the_plan_says_what_the_hardware_lacks(kernel, device):
    plan = kernel.attention_plan(**PLAIN.inputs(device=device))
    assert "not float32" in plan.reasons["flash_accelerated"]
