"""A run that is killed, stopped, out of memory, out of disk or fed with NaN: what it must come to. Both training scripts.

`SLOW=1 pytest tests/test_survival.py` makes the fault run of 20 kills; otherwise it is 3.
"""
import contextlib
import json
import os
import random
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from test_grpo import fork, stored, without_clock
from test_rollout import process_group  # noqa: F401, F811

HERE = Path(__file__).resolve().parent.parent
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")} | {
    "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(HERE)}
SCRIPTS = ["grpo.py", "ppo.py"]


def options(demo, folder, **changed):
    """The command line of a short run on the demo."""
    given = dict(train_files=demo / "train.parquet", val_files="", model_path=demo / "model", engine="hf", rollout_n=4, train_batch_size=4, max_prompt_length=32,
                 max_response_length=10, max_tokens_per_micro_batch=4096, lr=1e-3, val_before_train="false", test_freq=0, save_freq=0, logger="jsonl", reward_workers=1,
                 default_local_dir=folder, project_name="runs", experiment_name="run") | changed
    return [str(x) for key, value in given.items() for x in (f"--{key}", value)]


def start(script, demo, folder, ranks=1, patch="", **changed):
    """The script as a user starts it. patch: Python that runs first, in the script's process."""
    path = HERE / script
    if patch:
        path = folder / f"patched_{script}"
        path.write_text(f"import runpy, sys\n{patch}\nsys.argv[0] = '{HERE / script}'\nrunpy.run_path(sys.argv[0], run_name='__main__')\n")
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", "--"] if ranks > 1 else []
    return subprocess.Popen([sys.executable, *launch, str(path), *options(demo, folder, **changed)], env=ENVIRONMENT, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True, start_new_session=True)


def finish(*arguments, **changed):
    """Such a run to its end -> exit code, output."""
    process = start(*arguments, **changed)
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


def become(script, patch, argv):
    exec(patch, {})
    sys.argv = [str(HERE / script), *argv]
    runpy.run_path(sys.argv[0], run_name="__main__")


def forked(script, demo, folder, ranks=1, patch="", **changed):
    """The same in processes forked from one that has imported torch, which is quicker -> exit code, what the first rank said."""
    done = fork(become, folder, script, patch, options(demo, folder, **changed), ranks=ranks)
    return max(done.codes, key=abs), done.out[0] + done.err[0]


def rows(folder):
    return [json.loads(line) for line in (folder / "runs/run/metrics.jsonl").read_text().splitlines()]


def ranks_of(process):
    """Process ids of the training processes of a torchrun."""
    children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    return [int(c) for c in children]


# ---- kills

def test_killed_at_random_moments_equals_undisturbed(process_group, demo, tmp_path):
    """SIGKILL of one rank or of all, also inside a save: the same rows but for the clock, the same weights and moments, bit for bit."""
    kills, steps, draw = (20, 24, random.Random(0)) if os.environ.get("SLOW") else (3, 6, random.Random(1))
    settings = dict(ranks=2, total_training_steps=steps, save_freq=1, max_ckpt_to_keep=2, use_kl_in_reward="true", kl_ctrl="adaptive", kl_coef=0.05, test_freq=3,
                    val_files=demo / "test.parquet", filter_groups="true", max_num_gen_batches=2)
    (tmp_path / "calm").mkdir(), (tmp_path / "killed").mkdir()
    code, output = finish("grpo.py", demo, tmp_path / "calm", **settings)
    assert code == 0, output[-3000:]
    run, in_save, progress = tmp_path / "killed/runs/run", 0, [0]
    for k in range(kills):
        process = start("grpo.py", demo, tmp_path / "killed", **settings)
        last = lambda: max([int(p.name.split("_")[-1]) for p in run.glob("global_step_*") if p.name[-1].isdigit()], default=0)
        goal = steps * k // kills  # the step to be saved before this kill
        while last() < goal and process.poll() is None:
            time.sleep(0.005)
        deadline, saving = time.monotonic() + draw.random() * 0.8, False  # somewhere in the next step or two; every second kill waits for a save
        while process.poll() is None and not (saving if k % 2 else time.monotonic() > deadline):
            saving = any(run.glob(".tmp_global_step_*"))
        time.sleep(draw.random() * 0.1 * (k % 2))
        in_save += any(run.glob(".tmp_global_step_*"))
        progress.append(last())
        ranks = ranks_of(process)
        for pid in [draw.choice(ranks)] if ranks and draw.random() < 0.5 else [process.pid, *ranks]:  # of one rank torchrun ends the other
            with contextlib.suppress(ProcessLookupError):  # it may just have ended by itself
                os.kill(pid, signal.SIGKILL)
        process.communicate(timeout=120)
    code, output = finish("grpo.py", demo, tmp_path / "killed", **settings)
    assert code == 0, output[-3000:]
    calm, killed = ([json.dumps(without_clock(r)) for r in rows(tmp_path / name)] for name in ("calm", "killed"))
    assert killed == calm and len(calm) == steps
    a, b = (stored(tmp_path / name / f"runs/run/global_step_{steps}/actor") for name in ("calm", "killed"))
    assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    print(f"{kills} kills, {in_save} of them inside a save, at steps {progress[1:]}: {len(calm)} rows and {len(a)} tensors equal")


def test_a_dead_rank_ends_the_job_with_its_traceback(demo, tmp_path):
    patch = "import os, rollout\nif os.environ['RANK'] == '1':\n    def score(*_):\n        raise RuntimeError('rank one broke here')\n    rollout.score = score"
    code, output = finish("grpo.py", demo, tmp_path, ranks=2, patch=patch, total_training_steps=1)
    assert code != 0 and "rank one broke here" in "\n".join(output.splitlines()[-40:])


@pytest.mark.parametrize("script", SCRIPTS)
def test_resume_on_another_number_of_ranks(process_group, demo, tmp_path, script):  # fault 60
    """Four steps on one rank; two on two ranks and two on one; two on one and two on two: the same prompts and losses."""
    losses = ["actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/score/mean"] + ["critic/vf_loss", "critic/grad_norm"] * (script == "ppo.py")
    found = {}
    for first, then in ((1, 1), (2, 1), (1, 2)):
        folder = tmp_path / f"{first}{then}"
        folder.mkdir()
        for ranks, steps in ((first, 2), (then, 4)):
            code, output = forked(script, demo, folder, ranks=ranks, total_training_steps=steps, save_freq=2, use_kl_in_reward="true", kl_ctrl="adaptive", kl_coef=0.05)
            assert code == 0, output[-3000:]
        found[first, then] = [[r[key] for key in losses] for r in rows(folder)]
    for case in ((2, 1), (1, 2)):
        torch.testing.assert_close(torch.tensor(found[case]), torch.tensor(found[1, 1]), rtol=1e-5, atol=1e-5)


# ---- signals

@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_says_so(process_group, demo, tmp_path, script, number):
    """The step is finished and saved, whatever --save_freq, and the exit code is 128 + signal."""
    process = start(script, demo, tmp_path, total_training_steps=4000, save_freq=1000)
    while not (tmp_path / "runs/run/metrics.jsonl").exists() or len(rows(tmp_path)) < 2:
        assert process.poll() is None, process.communicate()[0][-3000:]
        time.sleep(0.01)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number and f"{number.name}: finishing the step and saving" in output, output[-3000:]
    step = rows(tmp_path)[-1]["step"]
    assert (tmp_path / f"runs/run/global_step_{step}/state.json").exists()


# ---- memory

OUT_OF_MEMORY = """
import torch, torch.nn.functional as F
class Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, g): raise torch.OutOfMemoryError("for the test")
def linear(x, weight, bias=None, plain=F.linear, calls=[0]):
    out = plain(x, weight, bias)
    if torch.is_grad_enabled() and x.requires_grad:
        calls[0] += 1
        if calls[0] == 30:
            if WHERE == "forward": raise torch.OutOfMemoryError("for the test")
            out = Fail.apply(out)
    return out
if WHERE: F.linear = linear
"""


@pytest.mark.parametrize("script", SCRIPTS)
def test_out_of_memory_halves_the_budget(demo, tmp_path, script):
    """The update is made again from nothing: all of its numbers are those of a run that had the memory, bit for bit (both budgets hold the mini-batch)."""
    found = {}
    for where in ("", "forward", "backward"):
        (tmp_path / (where or "none")).mkdir()
        code, output = forked(script, demo, tmp_path / (where or "none"), patch=f"WHERE = '{where}'\n{OUT_OF_MEMORY}", total_training_steps=2, max_tokens_per_micro_batch=1024)
        assert code == 0 and ("going on with --max_tokens_per_micro_batch 512" in output) == bool(where), output[-3000:]
        found[where] = [without_clock(r) for r in rows(tmp_path / (where or "none"))]
    assert found[""] == found["forward"] == found["backward"]


# ---- NaN

@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("what", ["log-prob", "gradient"])
def test_a_nan_costs_its_update_alone(process_group, demo, tmp_path, script, what):
    """One NaN among the first step's log-probs or gradients: that update is skipped and counted, weights and later steps stay finite."""
    patch = """
import torch
def once(x, done=[]):
    if x.requires_grad and not done:
        done.append(1)
        x = x.clone()
        if WHAT == "log-prob": x.data[0] = float("nan")
        else: x.register_hook(lambda g: torch.full_like(g, float("nan")))
    return x
gather = torch.Tensor.gather
def poisoned(self, *arguments): return once(gather(self, *arguments))
torch.Tensor.gather = poisoned
"""
    code, output = forked(script, demo, tmp_path, patch=f"WHAT = {what!r}\n{patch}", total_training_steps=2, save_freq=2)
    assert code == 0 and "skipped" in output, output[-3000:]
    first, second = rows(tmp_path)
    assert first["actor/skipped_updates"] == 1 and second["actor/skipped_updates"] == 0 and second["actor/grad_norm"] > 0
    weights = stored(tmp_path / "runs/run/global_step_2/actor")
    assert all(v.isfinite().all() for v in weights.values() if v.is_floating_point())
    assert not any(isinstance(v, float) and v != v for r in (first, second) for v in r.values())


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_nan_reward_is_a_missing_one(demo, tmp_path, script):  # fault 14 in the loop
    """One response of the batch without a reward: it is left out, the rest is trained on."""
    (tmp_path / "reward.py").write_text("def reward(data_source, solution_str, ground_truth, extra_info=None, seen=[]):\n    seen.append(1)\n"
                                        "    return float('nan') if len(seen) == 2 else float(len(seen) % 3)\n")
    code, output = forked(script, demo, tmp_path, reward_fn=f"{tmp_path / 'reward.py'}:reward", total_training_steps=1)
    row, = rows(tmp_path)
    assert code == 0 and row["reward/error_frac"] == 1 / 16 and row["actor/grad_norm"] > 0, output[-3000:]
    assert not any(isinstance(v, float) and v != v for v in row.values())


@pytest.mark.parametrize("script", SCRIPTS)
def test_too_many_skipped_steps_end_the_run(demo, tmp_path, script):
    (tmp_path / "reward.py").write_text("def reward(data_source, solution_str, ground_truth, extra_info=None):\n    raise ValueError('broken')\n")
    code, output = forked(script, demo, tmp_path, reward_fn=f"{tmp_path / 'reward.py'}:reward", total_training_steps=9, max_skipped_steps=2)
    assert code == 1 and "2 steps in a row" in output.splitlines()[-1] and len(rows(tmp_path)) == 2, output[-3000:]
    dumped = [json.loads(line) for line in (tmp_path / "runs/run/rollouts/step_2_rank_0_skipped.jsonl").read_text().splitlines()]
    assert len(dumped) == 16 and all(len(d["advantages"]) == len(d["response_ids"]) for d in dumped)


# ---- disk

@pytest.mark.parametrize("script", SCRIPTS)
def test_a_failed_save_does_not_end_the_run(demo, tmp_path, script):
    """The save of step 2 finds no room: a warning; step 3 is saved and the run ends well. If the last one fails the exit code says so."""
    patch = "import merge\nwrite = merge.save_checkpoint\ndef save(run_dir, step, *rest):\n    if step in FAIL: raise OSError('no room')\n    return write(run_dir, step, *rest)\nmerge.save_checkpoint = save"
    code, output = forked(script, demo, tmp_path, patch=f"FAIL = [2]\n{patch}", total_training_steps=3, save_freq=1)
    assert code == 0 and "step 2 is not saved: no room" in output, output[-3000:]
    assert sorted(p.name for p in (tmp_path / "runs/run").glob("global_step_*")) == ["global_step_1", "global_step_3"]
    code, output = forked(script, demo, tmp_path, patch=f"FAIL = [4]\n{patch}", total_training_steps=4, save_freq=1)
    assert code == 1 and output.splitlines()[-1].endswith("step 4 is not saved: no room")


# ---- warnings

def test_an_odd_metric_warns_once_and_says_what_to_try(tmp_path, capsys):
    from types import SimpleNamespace

    import merge
    log = merge.make_logger(SimpleNamespace(logger="jsonl"), tmp_path, 0)
    for step, entropy in enumerate([1.0, 0.5, 0.02, 0.01, 4.0], 1):
        log(step, {"actor/entropy": entropy, "critic/constant_groups_frac": 0.9 if step < 4 else 1.0, "reward/error_frac": 0.0})
    said = capsys.readouterr().err.strip().splitlines()
    assert [line.split(":")[1].strip() for line in said] == ["step 3", "step 4", "step 5"] and "--entropy_coeff" in said[0] and "no group" in said[1]


# ---- odd samples

def test_ids_beyond_the_tokenizer_score_0(demo):  # fault 50
    """The model's vocabulary may be padded: such an id decodes to nothing, and the text around it, right or not, is not what was sampled."""
    from transformers import AutoTokenizer

    import reward
    import rollout
    tokenizer = AutoTokenizer.from_pretrained(demo / "model")
    ids = tokenizer("#### 7", add_special_tokens=False)["input_ids"]
    samples = [rollout.Sample([5], [*more, *ids], "stop", None) for more in ([], [len(tokenizer)], [len(tokenizer) + 19])]
    rows = [{"data_source": "openai/gsm8k", "ground_truth": "7", "extra_info": {}}] * 3
    with reward.Scorer("auto", workers=1) as scorer:
        texts, scores = rollout.score(scorer, tokenizer, samples, rows)
    assert texts == ["#### 7"] * 3 and [(s.score, s.no_answer) for s in scores] == [(1.0, False), (0.0, True), (0.0, True)]


@pytest.mark.parametrize("script", SCRIPTS)
def test_length_metrics_count_response_tokens(demo, tmp_path, script):  # fault 32
    """Lengths are those of the sampled ids, and clip_ratio is the share of responses that have all --max_response_length of them."""
    code, output = forked(script, demo, tmp_path, total_training_steps=1, max_response_length=4, dump_rollouts=16, temperature=1.5)
    lengths = [len(json.loads(line)["response_ids"]) for line in (tmp_path / "runs/run/rollouts/step_1.jsonl").read_text().splitlines()]
    row, = rows(tmp_path)
    assert code == 0 and len(lengths) == 16 and 0 < lengths.count(4) < 16, output[-3000:]
    assert [row[f"response_length/{k}"] for k in ("mean", "max", "min", "clip_ratio")] == [sum(lengths) / 16, max(lengths), min(lengths), lengths.count(4) / 16]
