"""The benchmark's commands fit the scripts, and its numbers are the medians and rates that they claim to be."""
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import bench
import grpo
import ppo
from rollout import parse_args


@pytest.mark.parametrize("extra", [[], ["--tiny"], ["--engine", "hf"], ["--engines", "1"]])
def test_every_command_is_one_that_the_script_accepts(extra):
    opt = bench.parser.parse_args(["all", "--peer", "trl", "--model", "m", "--data", "d", "--out", "/tmp/none", *extra])
    runs = bench.workloads(opt)
    assert {name.split("/")[0] for name in runs} == set(bench.WORKLOADS)
    for name, run in runs.items():
        script = {"grpo.py": grpo, "ppo.py": ppo}.get(Path(run.command[1]).name)
        if script:
            args = parse_args(script.Args, run.command[2:])
            script.check(args, world=1)
            assert args.total_training_steps > run.warmup, name


def test_words_choose_runs():
    names = lambda *words: list(bench.workloads(bench.parser.parse_args([*words, "--model", "m", "--data", "d"])))
    assert names("grpo") == ["grpo"]
    assert names("sizes/7b") == ["sizes/7b", "sizes/7b-checkpointing", "sizes/7b-offload", "sizes/7b-policy"]
    assert names("sync", "batch/16") == ["sync/awake", "sync/asleep", "batch/16"]


@pytest.mark.parametrize("code, log, how", [
    (0, "torch.OutOfMemoryError, but only as a warning", "ok"),
    (1, "x\ngrpo.py: out of GPU memory (tried to allocate 2 GiB). Lower --max_tokens_per_micro_batch", "out of memory"),
    (1, "Traceback\nValueError: no such thing\nsome noise of a shutdown", "failed (1): ValueError: no such thing"),
    (-9, "steps: 10%", "failed (killed; host memory?): steps: 10%"), (None, "steps: 10%", "out of time")])
def test_verdict(code, log, how):
    assert bench.verdict(code, log) == how


def test_summary_leaves_warm_up_out_and_splits_the_step():
    step = lambda total: {"timing/step": total, "timing/gen": 1.0, "timing/update_actor": 2.0, "timing/update_critic": 1.0, "timing/sync": 0.25, "perf/total_num_tokens": 1000}
    run = {"warmup": 1, "steps": [step(90.0), step(5.0), step(4.5), step(9.0)], "parameters": 1e9}
    result = bench.summary(run)
    assert (result["step"], result["generate"], result["update"], result["rest"], result["steps"], result["rate"]) == (5.0, 1.0, 3.0, 0.75, 3, 200.0)
    assert result["tflops"] == pytest.approx(6 * 1e9 * 1000 * 2 / 3 / 1e12)  # actor and critic
    assert bench.summary(run | {"warmup": 4}) is None


def test_targets_are_judged(capsys):
    steps = lambda seconds: [{"timing/step": seconds, "timing/gen": 1.0, "timing/update_actor": 1.0, "perf/total_num_tokens": 163_000}]
    run = {"warmup": 0, "parts": [], "parameters": None, "sleep": "never", "status": "ok", "wall": 1.0, "peak_gib": 50.0}
    parts = [{"what": "update", "kind": "update", "seconds": [0.5, 1.0, 0.6], "tokens": 72_000, "flops": 6e12}, {"what": "bf16", "kind": "matmul", "seconds": [0.1], "flops": 8e13}]
    results = {"machine": {"gpu": None}, "runs": {"grpo": run | {"steps": steps(2.9)}, "trl": run | {"steps": steps(8.0), "peak_gib": 60.0}, "update": run | {"steps": [], "parts": parts}}}
    bench.show(results)
    out = capsys.readouterr().out
    assert "| GRPO, SmolLM2-135M, 64 x 8 x 256: seconds a step | <= 3 | 2.9 | met |" in out
    assert "| TRL's seconds over ours | >= 3 | 2.76 | missed |" in out
    assert "against TRL's | <= 60 | 50 | met |" in out
    assert "update, 0.5B: tokens/s (best: update) | >= 115,000 | 120,000 | met |" in out
    assert "| update | 0.6 | 120,000 | 10 | 0.0125 | - |" in out
    assert "PPO quick start: seconds a step | <= 5 | - | not run |" in out


def test_line_fit():
    assert bench.line_fit([(0, 1.0), (10, 2.0), (20, 3.0)]) == pytest.approx((1.0, 0.1, 1.0))
