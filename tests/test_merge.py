"""The checkpoint format: what is saved comes back, on another number of ranks too; torn ones are skipped; the merged
directory is the trainer's model. A second number of ranks runs in child processes (this file with an argument)."""
import itertools
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import grpo
import merge
from prepare_data import demo_tokenizer
from rollout import full_weights
from test_rollout import TORCHRUN, change, make_args, process_group, run_script, save_model  # noqa: F401

MERGE = Path(merge.__file__)


def load_trainer(path, steps=()):
    """Model and optimizer, after optimizer steps along random gradients of these seeds."""
    model = grpo.load_model(path, make_args("hf"), torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    for seed in steps:
        change(optimizer, seed)
    return model, optimizer


def everything(model, optimizer):
    """{name: whole tensor} of weights, moments and step counters."""
    moments = get_optimizer_state_dict(model, optimizer)["state"]
    found = dict(full_weights(model, torch.float32, "cpu")) | {f"{name} {kind}": v for name, state in moments.items() for kind, v in state.items()}
    return {name: (v.full_tensor() if isinstance(v, DTensor) else v).clone() for name, v in found.items()}


def assert_equal(a, b):
    assert a.keys() == b.keys() and len(a) > 60  # 20 weights, two moments and a counter each
    assert all(torch.equal(a[name], b[name]) for name in a), [name for name in a if not torch.equal(a[name], b[name])]


def save(run_dir, step, trainer, **options):
    merge.save_checkpoint(run_dir, step, {"actor": trainer}, {"step": step, "kl_coef": 0.0202}, demo_tokenizer(), **options)
    return run_dir / f"global_step_{step}"


def two_ranks_worker(folder):
    """Load what one process saved, compare, save on two ranks; then a save that fails on one of them."""
    grpo.init_distributed()
    trainer = load_trainer(folder / "model")
    state = merge.load_checkpoint(folder / "global_step_1", {"actor": trainer})
    assert state["step"] == 1
    assert_equal(everything(*trainer), torch.load(folder / "expected_1.pt"))
    change(trainer[1], 5)
    save(folder, 2, trainer)
    expected = everything(*trainer)
    if dist.get_rank() == 0:
        torch.save(expected, folder / "expected_2.pt")
    dist.barrier()
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    with pytest.raises(OSError, match="can't save .*global_step_3, is the disk full"):
        save(folder, 3, trainer)
    dist.barrier()
    assert merge.find_checkpoint(folder) == folder / "global_step_2" and not list(folder.glob(".tmp_*"))
    dist.destroy_process_group()


FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.listdir", "os.scandir"}


def kill_at(run_dir, k):
    """SIGKILL to this process at the k-th time that Python touches a file or folder of run_dir."""
    left = itertools.count(k - 1, -1)
    def hook(event, args):
        inside_rmtree = event in ("os.remove", "os.rmdir") and args[1] != -1  # a name relative to an open folder
        if event in FILE_EVENTS and (str(args[0]).startswith(str(run_dir)) or inside_rmtree) and next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)


def in_a_fork(work):
    """Run work() in a fork with a process group of its own -> its wait status."""
    if (pid := os.fork()) == 0:
        try:
            grpo.init_distributed()
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def killed_saves_worker(folder, step, stride):
    """Save `step` over copies of a run that has 10 and 20, killed at the 1st, (1 + stride)th, ... file operation, and go on from what is left."""
    run_dir, step = folder / "killed", int(step)
    assert in_a_fork(lambda: [save(folder / "base", n, load_trainer(folder / "model", steps=(0, n))) for n in (10, 20)]) == 0
    before = contents(folder / "base" / "global_step_20")
    def attempt():
        trainer = load_trainer(folder / "model", steps=(0, 1, 2))
        kill_at(run_dir, k)
        merge.save_checkpoint(run_dir, step, {"actor": trainer}, {"step": step, "new": True}, demo_tokenizer(), max_to_keep=1)
    def go_on():
        trainer = load_trainer(folder / "model")
        merge.load_checkpoint(found, {"actor": trainer})
        save(run_dir, 40, trainer)
    outcomes = []
    for k in itertools.count(1, int(stride)):
        shutil.rmtree(run_dir, ignore_errors=True)
        shutil.copytree(folder / "base", run_dir)
        status = in_a_fork(attempt)
        assert status in (0, signal.SIGKILL), (k, status)
        found = merge.find_checkpoint(run_dir)
        state, after = json.loads((found / "state.json").read_text()), contents(found)
        assert state["step"] in (20, step) and merge.why_incomplete(found) is None, (k, found)
        assert after == before or state["new"], (k, found)
        outcomes.append("old" if after == before else "new")
        assert in_a_fork(go_on) == 0, k
        left = {p.name for p in run_dir.iterdir()}
        assert {"global_step_40", f"global_step_{state['step']}"} <= left, (k, left)
        assert left <= {"latest_checkpointed_iteration.txt", *(f"global_step_{n}" for n in (10, 20, 30, 40))}, (k, left)
        assert contents(run_dir / f"global_step_{state['step']}") == after
        if status == 0:
            break
    assert outcomes == sorted(outcomes, reverse=True) and len(set(outcomes)) == 2, outcomes
    print(k, outcomes)


def contents(path):
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def saved(process_group, tmp_path_factory):
    """A run with one checkpoint, its trainer's state, and what torch.rand gave after the save."""
    folder = tmp_path_factory.mktemp("run")
    save_model(folder / "model", "qwen2 tied")
    trainer = load_trainer(folder / "model", steps=(0, 1))
    with torch.no_grad():
        trainer[0](torch.arange(8)[None], cu_seq_lens_q=torch.tensor([0, 8], dtype=torch.int32), max_length_q=8)  # leaves the root unsharded
    torch.manual_seed(7)
    save(folder, 1, trainer)
    return folder, everything(*trainer), torch.rand(3)


@pytest.fixture
def run_dir(saved, tmp_path):
    """Copies of that checkpoint as steps 10 and 20."""
    for step in (10, 20):
        shutil.copytree(saved[0] / "global_step_1", tmp_path / f"global_step_{step}")
    return tmp_path


# ---- save and load

def test_load_gives_back_weights_moments_and_random_numbers(saved):
    folder, expected, random = saved
    trainer = load_trainer(folder / "model")  # a new process's: other weights, no moments yet
    assert not torch.equal(everything(*load_trainer(folder / "model", steps=(3,)))["model.norm.weight"], expected["model.norm.weight"])
    trainer[1].param_groups[0]["lr"] = 0.5
    state = merge.load_checkpoint(folder / "global_step_1", {"actor": trainer})
    assert torch.equal(torch.rand(3), random)
    assert (state["step"], state["kl_coef"]) == (1, 0.0202)
    found = everything(*trainer)
    assert_equal(found, expected)
    assert {v.item() for name, v in found.items() if name.endswith(" step")} == {2.0}
    assert trainer[1].param_groups[0]["lr"] == 0.03
    again = load_trainer(folder / "model", steps=(0, 1, 2))
    change(trainer[1], 2)
    assert_equal(everything(*trainer), everything(*again))  # the next step is the one that would have been


def test_one_rank_to_two_and_back(saved):  # fault 60
    folder, expected, _ = saved
    torch.save(expected, folder / "expected_1.pt")
    run_script(*TORCHRUN, __file__, "two_ranks_worker", folder)
    assert sorted(p.name for p in (folder / "global_step_2" / "rng").iterdir()) == ["rank_0.pt", "rank_1.pt"]
    trainer = load_trainer(folder / "model", steps=(3,))
    merge.load_checkpoint(folder / "global_step_2", {"actor": trainer})
    assert_equal(everything(*trainer), torch.load(folder / "expected_2.pt"))


def test_actor_and_critic(saved, tmp_path):
    model = saved[0] / "model"
    actor, critic = load_trainer(model, steps=(0,)), load_trainer(model, steps=(1,))
    merge.save_checkpoint(tmp_path, 1, {"actor": actor, "critic": critic}, {"step": 1}, demo_tokenizer())
    other = {"actor": load_trainer(model), "critic": load_trainer(model)}
    merge.load_checkpoint(tmp_path / "global_step_1", other)
    assert_equal(everything(*other["actor"]), everything(*actor))
    assert_equal(everything(*other["critic"]), everything(*critic))


# ---- complete or absent

def test_saved_layout(saved):
    folder = saved[0]
    assert json.loads((folder / "global_step_1" / "state.json").read_text())["files"].keys() >= {
        "actor/.metadata", "actor/__0_0.distcp", "rng/rank_0.pt", "actor/huggingface/config.json", "actor/huggingface/tokenizer.json"}
    assert not list(folder.glob(".tmp_*")) and not list(folder.glob("*.tmp"))


def test_latest_and_max_to_keep(saved, tmp_path):
    trainer = load_trainer(saved[0] / "model", steps=(0,))
    for step in (9, 10, 100):
        save(tmp_path, step, trainer, max_to_keep=2)
        assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == str(step)
    assert [step for step, _ in merge.list_checkpoints(tmp_path)] == [10, 100]
    assert merge.find_checkpoint(tmp_path) == tmp_path / "global_step_100"
    save(tmp_path, 100, trainer, max_to_keep=0)  # once more over itself; 0 keeps all
    assert [step for step, _ in merge.list_checkpoints(tmp_path)] == [10, 100]
    assert merge.why_incomplete(tmp_path / "global_step_100") is None


@pytest.mark.parametrize("torn", [True, False])
def test_max_to_keep_keeps_the_new_one_beside_a_later_one(run_dir, saved, torn):
    """After a resume from step 10, because 20 is torn or because the user said so."""
    if torn:
        tear_state(run_dir / "global_step_20")
    save(run_dir, 15, load_trainer(saved[0] / "model", steps=(0,)), max_to_keep=1)
    assert [step for step, _ in merge.list_checkpoints(run_dir)] == [15, 20]
    assert merge.why_incomplete(run_dir / "global_step_15") is None


def test_newest_whole_checkpoint_is_found(run_dir, capsys):
    assert merge.find_checkpoint(run_dir) == run_dir / "global_step_20"
    assert merge.find_checkpoint(run_dir, "disable") is None
    assert merge.find_checkpoint(run_dir, str(run_dir / "global_step_10")) == run_dir / "global_step_10"
    assert capsys.readouterr().err == ""
    assert merge.find_checkpoint(run_dir / "no such run") is None


def tear_state(path):
    (path / "state.json").unlink()


def tear_truncated(path):
    os.truncate(path / "actor" / "__0_0.distcp", 1000)


def tear_missing(path):
    (path / "rng" / "rank_0.pt").unlink()


def tear_half_state(path):
    os.truncate(path / "state.json", 20)


def tear_list_state(path):
    (path / "state.json").write_text("[1, 2]")


def tamper_state(path):
    text = (path / "state.json").read_text()
    assert "0.0202" in text
    (path / "state.json").write_text(text.replace("0.0202", "0.0303"))


def tamper_rng(path):
    flip(path / "rng" / "rank_0.pt")


def tamper_weights(path):
    flip(path / "actor" / "__0_0.distcp")


def flip(path):
    """Another byte in the middle, the same size."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("tear, named", [
    (tear_state, "state.json is missing"), (tear_truncated, "actor/__0_0.distcp is missing or has another size"),
    (tear_missing, "rng/rank_0.pt is missing"), (tear_half_state, "state.json is torn"), (tear_list_state, "state.json is torn"),
    (tamper_state, "state.json was changed"), (tamper_rng, "rng/rank_0.pt was changed"), (tamper_weights, "actor/__0_0.distcp was changed")])
def test_torn_checkpoint_is_named_and_skipped(run_dir, capsys, tear, named):  # fault 59
    tear(run_dir / "global_step_20")
    (run_dir / "latest_checkpointed_iteration.txt").write_text("20")
    assert merge.find_checkpoint(run_dir) == run_dir / "global_step_10"
    message = capsys.readouterr().err
    assert str(run_dir / "global_step_20") in message and named in message
    with pytest.raises(ValueError, match=f"--resume_mode .*global_step_20 can't be resumed: {named}"):
        merge.find_checkpoint(run_dir, str(run_dir / "global_step_20"))
    with pytest.raises(ValueError, match=f"not a whole checkpoint: {named}"):
        merge.merge(run_dir / "global_step_20" / "actor", run_dir / "merged")
    tear(run_dir / "global_step_10")
    assert merge.find_checkpoint(run_dir) is None


@pytest.mark.parametrize("latest", ["", "twenty", "30"])
def test_latest_that_says_nothing_useful(run_dir, latest):
    (run_dir / "latest_checkpointed_iteration.txt").write_text(latest)
    assert merge.find_checkpoint(run_dir) == run_dir / "global_step_20"


def test_max_to_keep_counts_whole_ones(run_dir, saved):
    tear_state(run_dir / "global_step_20")
    trainer = load_trainer(saved[0] / "model", steps=(0,))
    save(run_dir, 30, trainer, max_to_keep=2)
    assert [step for step, _ in merge.list_checkpoints(run_dir)] == [10, 20, 30]  # not only the torn one and the new one
    save(run_dir, 40, trainer, max_to_keep=2)
    assert [step for step, _ in merge.list_checkpoints(run_dir)] == [30, 40]


@pytest.mark.parametrize("place", [".metadata", "optimizer"])
def test_loading_runs_no_code_from_the_files(process_group, tmp_path, place):
    dcp.save({"lr": Evil(tmp_path / "ran") if place == "optimizer" else 0.1}, checkpoint_id=tmp_path / "actor")
    if place == ".metadata":
        (tmp_path / "actor" / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "ran")))
    reason = {".metadata": "posix.mkdir has no place in .metadata", "optimizer": "lr is neither number nor text"}[place]
    with pytest.raises(ValueError, match=f"actor can't be loaded .*{reason}"):
        merge.read_sharded(tmp_path / "actor", {"lr": 0.1})
    assert not (tmp_path / "ran").exists()


class Evil:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_wrong_resume_path(run_dir):
    for wrong in (run_dir / "global_step_11", run_dir / "global_step_10" / "actor", run_dir):
        with pytest.raises(ValueError, match="give a .../global_step_N folder, auto or disable"):
            merge.find_checkpoint(run_dir, str(wrong))


@pytest.mark.parametrize("step, stride", [(20, 19), (30, 41)])
def test_killed_anywhere_in_a_save(tmp_path, step, stride):  # fault 59
    """Step 20 once more over itself, or the next one; keep-N deletes 10. SLOW=1 kills at every file operation."""
    save_model(tmp_path / "model", "qwen2 tied")
    print(run_script(__file__, "killed_saves_worker", tmp_path, step, 1 if os.environ.get("SLOW") else stride).stdout)


def test_leftover_of_a_killed_save(saved, tmp_path):
    left = tmp_path / ".tmp_global_step_5" / "actor"
    left.mkdir(parents=True)
    (left / "half.distcp").write_text("half")
    assert merge.find_checkpoint(tmp_path) is None
    save(tmp_path, 5, load_trainer(saved[0] / "model", steps=(0,)))  # the next attempt starts clean
    assert merge.find_checkpoint(tmp_path) == tmp_path / "global_step_5"
    assert not left.exists() and not (tmp_path / "global_step_5" / "actor" / "half.distcp").exists()


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 8 MB."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("mounting a file system is not permitted here")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def test_disk_full(small_disk, saved):  # fault 59
    """It fills up at every place where a save writes: among the shards, the tokenizer's files, random numbers, state.json."""
    trainer, earlier, ballast = load_trainer(saved[0] / "model", steps=(0,)), small_disk / "global_step_10", small_disk / "ballast"
    shutil.copytree(saved[0] / "global_step_1", earlier)
    latest = small_disk / "latest_checkpointed_iteration.txt"
    latest.write_text("10")
    needed = sum(-(-p.stat().st_size // 4096) for p in earlier.rglob("*") if p.is_file())  # pages
    outcomes = []
    for room in (0, 10, needed // 2, *range(needed - 10, needed + 3)):
        disk = os.statvfs(small_disk)
        ballast.write_bytes(bytes((disk.f_bavail - room) * disk.f_bsize))
        try:
            save(small_disk, 20, trainer, max_to_keep=1)
            outcomes.append(None)
            break
        except OSError as error:
            outcomes.append(str(error))
        finally:
            ballast.unlink()
        assert merge.find_checkpoint(small_disk) == earlier and contents(earlier) == contents(saved[0] / "global_step_1")
        assert not list(small_disk.glob(".tmp_*")) and latest.read_text() == "10"
    *full, last = outcomes
    for message in full:
        assert f"can't save {small_disk / 'global_step_20'}, is the disk full?" in message
        assert "GB free) Make room there or set --max_ckpt_to_keep (0 keeps all)" in message
    print(*full, sep="\n")
    assert last is None and len(full) > 5 and merge.find_checkpoint(small_disk) == small_disk / "global_step_20" and not earlier.exists()


# ---- logs

def test_metrics_file_of_a_resumed_run(tmp_path):  # fault 64
    """Killed in step 23, resumed from 20: every step once, none lost."""
    args = grpo.Args(logger="jsonl")
    steps = lambda: [json.loads(row)["step"] for row in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    log = merge.make_logger(args, tmp_path, 0)
    for step in range(23):
        log(step, {"actor/lr": step / 7})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 23, "actor/')
    log = merge.make_logger(args, tmp_path, 20)
    assert steps() == list(range(21))
    log(21, {"actor/lr": 3.0})
    assert steps() == list(range(22)) and os.listdir(tmp_path) == ["metrics.jsonl"]
    merge.make_logger(args, tmp_path, 0)  # from the start, because nothing had been saved
    assert steps() == []


# ---- merge

@pytest.mark.parametrize("name", ["llama tied", "llama untied", "qwen2 tied", "qwen2 untied"])
def test_merged_model_is_the_trainers(process_group, tmp_path, name):  # fault 61: one rank, tied weights, a scalar buffer
    save_model(tmp_path / "model", name)
    model, optimizer = load_trainer(tmp_path / "model", steps=(0, 1))
    model.register_buffer("scalar", torch.tensor(3.0))
    merge.merge(save(tmp_path, 2, (model, optimizer)) / "actor", tmp_path / "merged", "fp32")
    merged, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(loading.values()), loading
    assert type(merged).__name__ == {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[name.split()[0]] and merged.dtype == torch.float32
    ids = torch.randint(3, 107, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.set_attn_implementation("sdpa")
        expected, before = model(ids).logits, AutoModelForCausalLM.from_pretrained(tmp_path / "model")(ids).logits
        assert (merged(ids).logits - expected).abs().max() < 1e-5
        assert (before - expected).abs().max() > 0.1  # the trained model, not the one it came from


def test_merged_critic_is_a_critic(process_group, tmp_path):
    save_model(tmp_path / "model", "llama tied")
    critic = fully_shard(AutoModelForTokenClassification.from_pretrained(tmp_path / "model", num_labels=1))  # with a random head
    path = tmp_path / "global_step_1"
    merge.save_checkpoint(tmp_path, 1, {"critic": (critic, torch.optim.AdamW(critic.parameters()))}, {"step": 1}, demo_tokenizer())
    merge.merge(path / "critic", tmp_path / "merged", "fp32")
    merged, loading = AutoModelForTokenClassification.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(loading.values()), loading
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert (merged(ids).logits - critic(ids).logits).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["llama tied", "llama untied"])
def test_merged_dtype_and_size(process_group, tmp_path, name):  # fault 63
    from safetensors.torch import load_file
    save_model(tmp_path / "model", name)
    model, optimizer = load_trainer(tmp_path / "model", steps=(0,))
    parameters, actor = sum(p.numel() for p in model.parameters()), save(tmp_path, 1, (model, optimizer)) / "actor"
    for dtype, width, torch_dtype in (("bf16", 2, torch.bfloat16), ("fp16", 2, torch.float16), ("fp32", 4, torch.float32)):
        merge.merge(actor, tmp_path / dtype, dtype)
        tensors = load_file(tmp_path / dtype / "model.safetensors")
        assert {v.dtype for v in tensors.values()} == {torch_dtype}
        assert ("lm_head.weight" in tensors) == (name == "llama untied")
        assert json.loads((tmp_path / dtype / "config.json").read_text())["dtype"] == str(torch_dtype).removeprefix("torch.")
        assert width * parameters <= (tmp_path / dtype / "model.safetensors").stat().st_size < width * parameters + 5000  # a header
    bf16 = load_file(tmp_path / "bf16" / "model.safetensors")
    assert all(torch.equal(v.bfloat16(), bf16[n]) for n, v in load_file(tmp_path / "fp32" / "model.safetensors").items())


@pytest.mark.parametrize("generation", [
    {"temperature": 0.6, "top_p": 0.95, "do_sample": True, "eos_token_id": [2, 50]},
    {"temperature": 0.7, "top_p": 0.8, "do_sample": False, "eos_token_id": [2, 50]}])  # transformers refuses to save this one
def test_tokenizer_template_and_generation_config_come_along(process_group, tmp_path, generation):
    save_model(tmp_path / "model", "llama tied", **generation)
    merge.merge(save(tmp_path, 1, load_trainer(tmp_path / "model", steps=(0,))) / "actor", tmp_path / "merged")
    found = json.loads((tmp_path / "merged" / "generation_config.json").read_text())
    assert {k: found.get(k, False) for k in generation} == generation
    tokenizer, original = AutoTokenizer.from_pretrained(tmp_path / "merged"), demo_tokenizer()
    chat = [{"role": "user", "content": "2+2?"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == "<bos><|user|>2+2?<eos><|assistant|>"
    assert tokenizer.get_vocab() == original.get_vocab() and tokenizer.encode("a+b=#") == original.encode("a+b=#")
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<eos>", "<pad>")


def test_command_line(saved, tmp_path):
    actor = saved[0] / "global_step_1" / "actor"
    done = run_script(MERGE, "--local_dir", actor, "--target_dir", "my_model", cwd=tmp_path)
    assert f"merged {actor} -> my_model (bf16)" in done.stdout
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "my_model").dtype == torch.bfloat16
    merge.merge(actor, tmp_path / "same")
    assert (tmp_path / "my_model" / "model.safetensors").read_bytes() == (tmp_path / "same" / "model.safetensors").read_bytes()
    assert {p.name for p in (tmp_path / "my_model").iterdir()} >= {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


def test_wrong_folder(saved, tmp_path):
    complaint = "--local_dir {} holds no checkpoint; give a .../global_step_N/actor folder"
    done = run_script(MERGE, "--local_dir", "global_step_1", "--target_dir", tmp_path / "merged", ok=False, cwd=saved[0])
    assert done.returncode == 1 and done.stdout == "" and done.stderr == f"merge.py: {complaint.format('global_step_1')}\n"
    with pytest.raises(FileNotFoundError) as error:
        merge.merge("nowhere", tmp_path / "merged")
    assert str(error.value) == complaint.format("nowhere") and not (tmp_path / "merged").exists()


if __name__ == "__main__":
    {"two_ranks_worker": two_ranks_worker, "killed_saves_worker": killed_saves_worker}[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
