"""The checkpoint format: what is saved comes back, on another number of ranks too; torn ones are skipped; the merged
directory is the trainer's model. A second number of ranks runs in child processes (this file with an argument)."""
import json
import os
import resource
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
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
    """Load what one process saved, compare, save on two ranks."""
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
    dist.destroy_process_group()


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


def test_one_rank_to_two_and_back(saved):
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


@pytest.mark.parametrize("tear, named", [
    (tear_state, "state.json"), (tear_truncated, "actor/__0_0.distcp"), (tear_missing, "rng/rank_0.pt"),
    (tear_half_state, "state.json")])
def test_torn_checkpoint_is_named_and_skipped(run_dir, capsys, tear, named):
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


def test_wrong_resume_path(run_dir):
    for wrong in (run_dir / "global_step_11", run_dir / "global_step_10" / "actor", run_dir):
        with pytest.raises(ValueError, match="give a .../global_step_N folder, auto or disable"):
            merge.find_checkpoint(run_dir, str(wrong))


def test_leftover_of_a_killed_save(saved, tmp_path):
    left = tmp_path / ".tmp_global_step_5" / "actor"
    left.mkdir(parents=True)
    (left / "half.distcp").write_text("half")
    assert merge.find_checkpoint(tmp_path) is None
    save(tmp_path, 5, load_trainer(saved[0] / "model", steps=(0,)))  # the next attempt starts clean
    assert merge.find_checkpoint(tmp_path) == tmp_path / "global_step_5"
    assert not left.exists() and not (tmp_path / "global_step_5" / "actor" / "half.distcp").exists()


def test_save_that_fails_leaves_the_earlier_ones(run_dir, saved):
    trainer = load_trainer(saved[0] / "model", steps=(0,))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # a file may grow to 20 kB, as on a disk that fills up
    try:
        with pytest.raises(OSError, match="disk full"):
            save(run_dir, 20, trainer, max_to_keep=1)
    finally:  # and the earlier ones are intact in any case
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert [merge.why_incomplete(path) for _, path in merge.list_checkpoints(run_dir)] == [None, None]
    assert merge.find_checkpoint(run_dir) == run_dir / "global_step_20"
    assert not (run_dir / "latest_checkpointed_iteration.txt").exists() and not list(run_dir.glob(".tmp_*"))


# ---- merge

@pytest.mark.parametrize("name", ["llama tied", "llama untied", "qwen2 tied", "qwen2 untied"])
def test_merged_model_is_the_trainers(process_group, tmp_path, name):
    save_model(tmp_path / "model", name)
    model, optimizer = load_trainer(tmp_path / "model", steps=(0, 1))
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
def test_merged_dtype_and_size(process_group, tmp_path, name):
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
    {"two_ranks_worker": two_ranks_worker}[sys.argv[1]](Path(sys.argv[2]))
