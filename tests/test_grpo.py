"""grpo.py: its parts by hand-computed numbers and vectors, loss and gradient against plain transformers, and the real script.

The script runs as a user starts it (`python grpo.py`, `torchrun ... grpo.py`) where the launch matters. Elsewhere it is
the same file as `__main__` of a process forked from one that has imported torch: 0.2 s a start instead of 5.
"""
import json
import math
import multiprocessing
import os
import runpy
import socket
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.run import get_args_parser
from transformers import (AutoModelForCausalLM, AutoTokenizer, GraniteConfig, LlamaConfig, MistralConfig, Qwen2Config,
                          Qwen3Config)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import grpo
from merge import merge
from prepare_data import batch_rows, load_prompts
from rollout import Sample
from test_rollout import TORCHRUN, process_group, run_script  # noqa: F401

SCRIPT = Path(grpo.__file__)
VECTORS = Path(os.environ.get("VECTORS", Path(__file__).parent / "vectors"))
CPU = torch.device("cpu")
MODES = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


@pytest.fixture(scope="module", autouse=True)
def environment():
    """A model that isn't there isn't looked for on the net; the CPU, whose arithmetic repeats itself bit by bit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


def tensor(nested):
    """A vector's nested list, in which NaN and infinities are strings."""
    number = lambda x: [number(y) for y in x] if isinstance(x, list) else float(x)
    return torch.tensor(number(nested), dtype=torch.float64)


def close(actual, expected, rtol=1e-7, atol=1e-8):
    torch.testing.assert_close(torch.as_tensor(actual, dtype=torch.float64), torch.as_tensor(expected, dtype=torch.float64), rtol=rtol, atol=atol)


# ---- the real script

forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["torch._dynamo", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch.nn.attention.varlen",
                              "transformers.generation", "transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama",
                              "pyarrow.parquet", "jinja2", "pytest"])


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def launched(function, rank, ranks, port, log, *arguments):
    """In a forked process: torchrun's environment and files for the output, then the function."""
    keys = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for key in keys:
        os.environ.pop(key, None)
    if ranks > 1:
        os.environ.update(zip(keys, map(str, (rank, rank, ranks, ranks, "127.0.0.1", port))))
    for fd, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{log}_{rank}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), fd)
    torch.set_num_threads(1)
    function(*arguments)


def become_script(argv):
    sys.argv = [str(SCRIPT), *argv]
    runpy.run_path(str(SCRIPT), run_name="__main__")


def fork(function, folder, *arguments, ranks=1):
    """Run a function in forked processes -> exit codes and what each wrote."""
    port, log = free_port(), folder / "log"
    processes = [forks.Process(target=launched, args=(function, rank, ranks, port, log, *arguments)) for rank in range(ranks)]
    for p in processes:
        p.start()
    for p in processes:
        p.join(120)
        p.kill()
        p.join()
    read = lambda kind: [Path(f"{log}_{rank}.{kind}").read_text() for rank in range(ranks)]
    return SimpleNamespace(codes=[p.exitcode for p in processes], out=read("out"), err=read("err"))


def options(demo, folder, **changed):
    """The command line of a short run on the demo."""
    given = dict(train_files=demo / "train.parquet", val_files="", model_path=demo / "model", engine="hf", n=4, train_batch_size=4, max_prompt_length=32,
                 max_response_length=10, max_tokens_per_micro_batch=4096, lr=1e-4, val_before_train="false", test_freq=0, save_freq=0, logger="jsonl",
                 default_local_dir=folder, project_name="runs", experiment_name="run") | changed
    return [str(x) for key, value in given.items() for x in (f"--{key}", value)]


def run(demo, folder, ranks=1, **changed):
    """A run that must succeed -> rows of its metrics.jsonl, its folder, what it printed."""
    done = fork(become_script, folder, options(demo, folder, **changed), ranks=ranks)
    assert done.codes == [0] * ranks, done.err[0][-4000:]
    return SimpleNamespace(rows=metrics(folder), path=folder / "runs/run", out=done.out[0], err=done.err[0])


def metrics(folder):
    return [json.loads(line) for line in (folder / "runs/run/metrics.jsonl").read_text().splitlines()]


def without_clock(row):
    return {k: v for k, v in row.items() if not k.startswith(("timing/", "perf/"))}


def stored(path):
    """{name: whole tensor} of a sharded checkpoint: weights, moments, step counters."""
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {k: torch.empty(m.size, dtype=m.properties.dtype) for k, m in metadata.items() if hasattr(m, "properties")}
    dcp.load(tensors, checkpoint_id=path)
    return tensors


# ---- 1. packed log-probs and their gradients equal those of transformers, row by row

SIZE = dict(vocab_size=100, hidden_size=128, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=64, initializer_range=0.1, bos_token_id=1, eos_token_id=2, pad_token_id=0)
CONFIGS = {
    "llama tied": LlamaConfig(**SIZE, tie_word_embeddings=True),
    "llama untied": LlamaConfig(**SIZE, tie_word_embeddings=False),
    "qwen2 tied": Qwen2Config(**SIZE, tie_word_embeddings=True),
    "qwen2 untied": Qwen2Config(**SIZE, tie_word_embeddings=False),
    "qwen2, window in one layer": Qwen2Config(**SIZE, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZE, head_dim=32),
    "mistral, window": MistralConfig(**SIZE, sliding_window=5)}


def save_model(path, config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # zero by default, which hides them
            parameter.data.normal_(std=0.3)
    model.save_pretrained(path)
    return path


def random_samples(*lengths):
    """Samples of these (prompt, response) lengths."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(0, 100, (n,), generator=generator).tolist()
    return [Sample(draw(p), draw(r), "length", None) for p, r in lengths]


def row_logprobs(model, sample, temperature):
    """What transformers alone says of the response tokens of one sample: log-probs (r,), entropies (r,)."""
    ids = torch.tensor([sample.prompt_ids + sample.response_ids])
    logp = (model(ids).logits[0] / temperature).log_softmax(-1)[len(sample.prompt_ids) - 1:-1]   # (r, V)
    return logp.gather(1, torch.tensor(sample.response_ids, dtype=torch.long)[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_packed_equals_row_by_row(process_group, tmp_path, monkeypatch, name, checkpointing):
    monkeypatch.setattr(grpo, "HEAD_CHUNK", 7)  # 26 response tokens: four parts
    path, samples = save_model(tmp_path, CONFIGS[name]), random_samples((5, 3), (1, 9), (7, 0), (12, 1), (3, 13))
    plain = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa", dtype=torch.float32)
    packed = grpo.load_model(path, grpo.Args(dtype="fp32", compile="false", gradient_checkpointing=checkpointing), CPU)
    logp, entropy = packed.token_logprobs(*grpo.pack(samples, CPU), 0.7, True)
    expected_logp, expected_entropy = map(torch.cat, zip(*(row_logprobs(plain, s, 0.7) for s in samples)))
    close(logp, expected_logp, atol=1e-5)
    close(entropy, expected_entropy, atol=1e-5)
    weight = torch.linspace(-1, 2, 26)
    (weight * (logp + 0.3 * entropy)).sum().backward()
    (weight * (expected_logp + 0.3 * expected_entropy)).sum().backward()
    gradients = {n: p.grad.full_tensor() for n, p in packed.named_parameters()}
    assert gradients.keys() == {n for n, _ in plain.named_parameters()}
    for n, p in plain.named_parameters():
        assert p.grad.abs().max() > 0.1, n
        close(gradients[n], p.grad, atol=1e-5 * p.grad.abs().max().item())


def test_window_ends_where_it_should(process_group, tmp_path):
    """Two layers with a window of 5 (itself and 4 before) see 8 tokens back: position 9 predicts without token 0, position 8 with it."""
    model = grpo.load_model(save_model(tmp_path, CONFIGS["mistral, window"]), grpo.Args(dtype="fp32", compile="false"), CPU)
    logp = [model.token_logprobs(*grpo.pack([Sample([first, 5, 6, 7, 8, 9, 10, 11, 12], [13, 14], "length", None)], CPU), 1.0)[0] for first in (3, 4)]
    assert logp[0][0] != logp[1][0] and logp[0][1] == logp[1][1]


def test_reference_model_is_without_gradient(process_group, tmp_path):
    """batch_logprobs in two micro-batches, against transformers, in the order of the samples."""
    path, samples = save_model(tmp_path, CONFIGS["llama tied"]), random_samples((5, 3), (1, 9), (12, 1))
    args = grpo.Args(dtype="fp32", compile="false", max_tokens_per_micro_batch=10, temperature=0.7)
    model = grpo.load_model(path, args, CPU, train=False)
    logp = grpo.batch_logprobs(model, samples, [0, 3, 12, 13], args, CPU)
    plain = AutoModelForCausalLM.from_pretrained(path)
    close(logp, torch.cat([row_logprobs(plain, s, 0.7)[0] for s in samples]).detach(), atol=1e-5)
    assert not any(p.requires_grad for p in model.parameters())


def test_architecture_with_scaled_logits_is_refused(process_group, tmp_path):
    save_model(tmp_path, GraniteConfig(**SIZE, logits_scaling=8.0))
    with pytest.raises(ValueError, match="--model_path: packed log-probs of GraniteForCausalLM differ"):
        grpo.load_model(tmp_path, grpo.Args(dtype="fp32", compile="false"), CPU)


def test_pack_by_hand():
    """Pad 0 and EOS 2 are tokens like others: what was sampled is trained on, up to and with the EOS (pad may equal it)."""
    samples = [Sample([5, 6, 7], [8, 2], "stop", None), Sample([9, 4], [], "length", None), Sample([3], [5, 0, 2], "stop", None)]
    inputs, labels = grpo.pack(samples, CPU)
    assert inputs["input_ids"].tolist() == [[5, 6, 7, 8, 2, 9, 4, 3, 5, 0, 2]]
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3]]
    assert inputs["cu_seq_lens_q"].tolist() == [0, 5, 7, 11] and inputs["max_length_q"] == 5
    assert inputs["index"].tolist() == [2, 3, 7, 8, 9] and labels.tolist() == [8, 2, 5, 0, 2]
    assert grpo.flat_rows([0, 2, 2, 5], [2, 0]).tolist() == [2, 3, 4, 0, 1]


# ---- 2. loss and gradient do not depend on the micro-batches

REWARD = """
def reward(data_source, solution_str, ground_truth, extra_info):
    total = sum(map(ord, solution_str))
    if total % 5 == 0:
        raise ValueError("no score for this one")
    return total % 5

def broken(**item):
    raise ValueError("never a score")
"""


@pytest.fixture(scope="module")
def reward_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "reward.py"
    path.write_text(REWARD)
    return path


def reference_step(model_path, samples, rewards, mode, temperature, entropy_coeff, kl_coef, cut):
    """Loss of the first update and its gradient, from the formulas and a plain transformers model. KL is k1: zero, but not its gradient.

    cut: responses without an EOS are compared with their siblings, but not trained on."""
    advantages = []
    for start in range(0, len(rewards), 4):
        there = [r for r in rewards[start:start + 4] if not math.isnan(r)]
        for r in rewards[start:start + 4]:
            flat = math.isnan(r) or len(set(there)) == 1
            advantages.append(0.0 if flat else (r - statistics.mean(there)) / (statistics.stdev(there) + 1e-6))
    lengths = [len(s.response_ids) for s in samples]
    trained = [i for i, r in enumerate(rewards) if not math.isnan(r) and not (cut and samples[i].finish_reason == "length")]
    tokens, rows = sum(lengths[i] for i in trained), len(trained)
    model = AutoModelForCausalLM.from_pretrained(model_path)
    expected = {"pg_loss": 0.0, "entropy": 0.0}
    for i in trained:
        weight = {"token-mean": 1 / tokens, "seq-mean-token-sum": 1 / rows, "seq-mean-token-mean": 1 / (rows * lengths[i]),
                  "seq-mean-token-sum-norm": 1 / (rows * 10)}[mode]  # 10: --max_response_length
        logp, entropy = row_logprobs(model, samples[i], temperature)
        (weight * (-advantages[i] * logp - entropy_coeff * entropy + kl_coef * logp).sum()).backward()
        expected["pg_loss"] -= weight * advantages[i] * lengths[i]
        expected["entropy"] += weight * entropy.sum().item()
    gradient = {name: p.grad for name, p in model.named_parameters()}
    expected["grad_norm"] = math.sqrt(sum(g.square().sum().item() for g in gradient.values()))
    return expected, gradient


# Budget 42: every sample alone, the one without a reward too. 60: two or three together. 4096: all.
@pytest.mark.parametrize("mode, budget, pad, cut", [(mode, budget, "<pad>", False) for mode in MODES for budget in (42, 4096)]
                         + [("token-mean", 60, "<pad>", False), ("token-mean", 60, "<eos>", False), ("seq-mean-token-mean", 60, "<pad>", True)])
def test_gradient_of_a_step(process_group, demo, reward_file, tmp_path, mode, budget, pad, cut):
    """The script's first gradient (AdamW's first moment is a tenth of it) equals the formulas', whatever the micro-batches."""
    model_path = tmp_path / "model"
    AutoModelForCausalLM.from_pretrained(demo / "model").save_pretrained(model_path)
    tokenizer = AutoTokenizer.from_pretrained(demo / "model")
    tokenizer.pad_token = pad
    tokenizer.save_pretrained(model_path)
    coefficients = dict(temperature=0.8, entropy_coeff=0.01)
    row, = run(demo, tmp_path, model_path=model_path, reward_fn=f"{reward_file}:reward", loss_agg_mode=mode, max_tokens_per_micro_batch=budget,
               total_training_steps=1, save_freq=1, dump_rollouts=16, max_grad_norm=1e9, use_kl_loss="true", kl_loss_type="k1", kl_loss_coef=0.1,
               **coefficients, **(dict(mask_truncated="true", max_response_length=3) if cut else {})).rows
    dumped = [json.loads(line) for line in (tmp_path / "runs/run/rollouts/step_1.jsonl").read_text().splitlines()]
    train = load_prompts(demo / "train.parquet", tokenizer, 32)
    prompts = [train[i]["prompt_ids"] for i in batch_rows(len(train), 4, 0, 0) for _ in range(4)]
    samples = [Sample(p, d["response_ids"], d["finish_reason"], None) for p, d in zip(prompts, dumped, strict=True)]
    rewards = [d["score"] for d in dumped]
    assert 0 < sum(map(math.isnan, rewards)) < 8 and any(s.response_ids[-1] == tokenizer.eos_token_id for s in samples)
    assert all((s.response_ids[-1] == tokenizer.eos_token_id) == (s.finish_reason == "stop") for s in samples)

    assert not cut or 3 < sum(s.finish_reason == "length" for s in samples) < 13

    expected, gradient = reference_step(model_path, samples, rewards, mode, kl_coef=0.1, cut=cut, **coefficients)
    for key, value in expected.items():
        assert row[f"actor/{key}"] == pytest.approx(value, rel=1e-5, abs=1e-6), key
    moments, largest = stored(tmp_path / "runs/run/global_step_1/actor"), max(g.abs().max().item() for g in gradient.values())
    for name, g in gradient.items():
        close(moments[f"optimizer.state.{name}.exp_avg"] * 10, g, rtol=0, atol=1e-5 * largest)


def test_gradient_is_clipped(process_group, demo, tmp_path):
    """To a norm of .1: what AdamW got has that norm, the metric says what it was before."""
    done = run(demo, tmp_path, max_grad_norm=0.1, total_training_steps=1, save_freq=1)
    moments = stored(done.path / "global_step_1/actor")
    norm = math.sqrt(sum((10 * m).square().sum().item() for name, m in moments.items() if name.endswith(".exp_avg")))
    assert norm == pytest.approx(0.1, rel=1e-4) and done.rows[0]["actor/grad_norm"] > 0.2


def test_ratio_is_one_while_the_weights_stand_still(demo, tmp_path):
    """Two updates with a learning rate of 0: old and new log-probs are equal, the reference's too."""
    row, = run(demo, tmp_path, lr=0, ppo_mini_batch_size=2, use_kl_loss="true", temperature=0.7, total_training_steps=1).rows
    assert abs(row["actor/ppo_kl"]) < 1e-6 and abs(row["actor/kl_loss"]) < 1e-9 and row["actor/grad_norm"] > 0.1
    assert row["actor/pg_clipfrac"] == row["actor/pg_clipfrac_lower"] == 0


def test_options_that_save_memory_change_nothing(demo, tmp_path):
    rows = []
    for value in ("false", "true"):
        (tmp_path / value).mkdir()
        saving = dict.fromkeys(("gradient_checkpointing", "param_offload", "optimizer_offload"), value)
        rows.append([without_clock(r) for r in run(demo, tmp_path / value, ppo_mini_batch_size=2, total_training_steps=2, **saving).rows])
    assert rows[0] == rows[1]


def test_a_batch_without_any_reward_is_skipped(process_group, demo, reward_file, tmp_path):
    done = run(demo, tmp_path, reward_fn=f"{reward_file}:broken", total_training_steps=1, save_freq=1, rollout_logprobs=1)
    row, = done.rows
    assert row["actor/skipped_updates"] == 1 and row["reward/error_frac"] == 1 and row["critic/score/mean"] == 0
    assert not any(isinstance(v, float) and not math.isfinite(v) for v in row.values())
    assert row.get("rollout/probs_diff_max", 0) < 1e-4
    weights, before = stored(done.path / "global_step_1/actor"), AutoModelForCausalLM.from_pretrained(demo / "model").state_dict()
    assert all(torch.equal(weights[f"model.{name}"], value) for name, value in before.items())


@pytest.mark.parametrize("mode", MODES)
def test_clip_fractions_are_shares_of_tokens(demo, tmp_path, mode):
    """With clip ratios of 1e-9 the second update clips about half of the tokens that have an advantage."""
    row, = run(demo, tmp_path, loss_agg_mode=mode, ppo_mini_batch_size=2, clip_ratio_low=1e-9, clip_ratio_high=1e-9, total_training_steps=1).rows
    assert 0 < row["actor/pg_clipfrac"] <= 0.5  # 0 in the first of the two updates
    assert abs(row["actor/ppo_kl"]) < 0.1


@pytest.mark.parametrize("mode, expected", [("token-mean", [1 / 6] * 3), ("seq-mean-token-sum", [1 / 2] * 3),
                                            ("seq-mean-token-mean", [1 / 8, 1 / 2, 1 / 4]), ("seq-mean-token-sum-norm", [1 / 20] * 3)])
def test_loss_weights_by_hand(mode, expected):
    """Responses of 4, 0 (masked out) and 2 tokens, two rows and 6 tokens in all, at most 10 tokens a response."""
    close(grpo.loss_weights(torch.tensor([4, 0, 2]), mode, 6, 2, 10), expected, atol=1e-7)


def test_masked_response_is_no_part_of_the_mean():  # fault 30
    """A: 4 tokens of loss 1, masked out. B: 2 tokens of loss 3. The token mean is 6 / 2, not 6 / 6."""
    weight = grpo.loss_weights(torch.tensor([0, 2]), "token-mean", 2, 1, 4)
    assert (weight[1] * torch.tensor([3.0, 3.0])).sum() == 3


@pytest.mark.parametrize("mode", MODES)
def test_empty_mini_batch_weighs_finite(mode):
    assert grpo.loss_weights(torch.tensor([0, 0]), mode, 0, 0, 4).isfinite().all()


# ---- 3. two ranks equal one; 4. a resumed run equals the uninterrupted one

@pytest.fixture(scope="module")
def uneven(demo, tmp_path_factory):
    """17 training rows, 2 steps of 8 an epoch; 6 rows for validation. The first prompt of steps 1 and 2 is so long that no two of
    its answers share a micro-batch: of two ranks the one that has it runs more of them."""
    folder = tmp_path_factory.mktemp("uneven")
    train, test = pq.read_table(demo / "train.parquet"), pq.read_table(demo / "test.parquet")
    rows = train.take(list(range(0, 340, 20))).to_pylist()
    for step in range(2):
        message = rows[batch_rows(17, 8, 0, step)[0]]["prompt"][0]
        message["content"] = " ".join([message["content"]] * 5)
    pq.write_table(pa.Table.from_pylist(rows, schema=train.schema), folder / "train.parquet")
    pq.write_table(test.take(list(range(6))), folder / "test.parquet")
    return dict(train_files=folder / "train.parquet", val_files=folder / "test.parquet", train_batch_size=8, ppo_mini_batch_size=4, max_prompt_length=90,
                max_response_length=10, max_tokens_per_micro_batch=100, lr=5e-4, warmup_steps=10, use_kl_loss="true", kl_loss_coef=0.01, rollout_logprobs=1,
                total_epochs=3, save_freq=2, test_freq=2, val_n=2, val_temperature=1.0)


@pytest.fixture(scope="module")
def one_rank(demo, uneven, tmp_path_factory):
    """6 steps of two updates each, with a checkpoint every two steps."""
    folder = tmp_path_factory.mktemp("one_rank")
    run_script(SCRIPT, *options(demo, folder, **uneven))
    return folder


@pytest.fixture(scope="module")
def two_ranks(demo, uneven, tmp_path_factory):
    """The first 2 of these steps on two ranks."""
    folder = tmp_path_factory.mktemp("two_ranks")
    run_script(*TORCHRUN, "--", SCRIPT, *options(demo, folder, **uneven, total_training_steps=2))
    return folder


def test_torchrun_passes_the_options_on():
    """torchrun stops at an option that begins several of its own ("ambiguous option: --x could match ..."), though it stands behind the script."""
    theirs = get_args_parser()._option_string_actions
    for name in vars(grpo.Args()).keys() - {"n"} | {"rollout_n"}:  # --n is --rollout_n under torchrun
        assert len({id(action) for option, action in theirs.items() if option.startswith(f"--{name}")}) < 2, name
    assert grpo.parse_args(grpo.Args, ["--rollout_n", "3"]).n == grpo.parse_args(grpo.Args, ["--n", "3"]).n == 3


def test_two_ranks_equal_one(process_group, demo, one_rank, two_ranks, tmp_path):
    for one, two in zip(metrics(one_rank)[:2], metrics(two_ranks), strict=True):
        assert one["actor/grad_norm"] > 0.1
        for key in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "actor/kl_loss", "actor/ppo_kl", "actor/pg_clipfrac", "critic/score/mean",
                    "critic/advantages/max", "response_length/mean", "prompt_length/mean", "rollout/stop_frac", "critic/constant_groups_frac"):
            assert two[key] == pytest.approx(one[key], rel=1e-5, abs=1e-5), key
        assert one["rollout/probs_diff_max"] < 1e-5 and two["rollout/probs_diff_max"] < 1e-5
    weights = []
    for name, folder in ("one", one_rank), ("two", two_ranks):
        merge(folder / "runs/run/global_step_2/actor", tmp_path / name, dtype="fp32")
        weights.append(AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict())
    before = AutoModelForCausalLM.from_pretrained(demo / "model").state_dict()
    for name in before:
        close(weights[1][name], weights[0][name], atol=1e-5)
        assert (weights[0][name] - before[name]).abs().max() > 1e-4, name


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_two_ranks_equal_one_where_rewards_are_missing(process_group, demo, reward_file, tmp_path, mode):
    """One update over 16 responses of which some have no reward: the same denominators, and the same gradient."""
    rows, moments = [], []
    for ranks in (1, 2):
        (tmp_path / str(ranks)).mkdir()
        done = run(demo, tmp_path / str(ranks), ranks=ranks, reward_fn=f"{reward_file}:reward", loss_agg_mode=mode, max_grad_norm=1e9,
                   max_tokens_per_micro_batch=60, total_training_steps=1, save_freq=1)
        rows += done.rows
        moments.append(stored(done.path / "global_step_1/actor"))
    assert 0 < rows[0]["reward/error_frac"] == rows[1]["reward/error_frac"] < 0.5
    for key in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/score/mean", "critic/score/min", "critic/advantages/max"):
        assert rows[1][key] == pytest.approx(rows[0][key], rel=1e-5, abs=1e-6), key
    largest = max(m.abs().max().item() for name, m in moments[0].items() if name.endswith("exp_avg"))
    for name in (name for name in moments[0] if name.endswith("exp_avg")):
        close(moments[1][name], moments[0][name], rtol=0, atol=1e-5 * largest)


def test_two_ranks_validate_like_one(one_rank, two_ranks):
    one, two = metrics(one_rank)[1], metrics(two_ranks)[1]
    assert {k: v for k, v in two.items() if k.startswith("val/")} == {k: v for k, v in one.items() if k.startswith("val/")}
    assert set(one) >= {"val/demo/arithmetic/acc", "val/demo/arithmetic/pass@2"}


def test_resumed_run_equals_the_uninterrupted_one(process_group, demo, uneven, one_rank, tmp_path):  # fault 54, 56
    """Stopped after step 4, the end of the second epoch, and killed in step 6 of a first attempt to go on, which left one row and a half."""
    run(demo, tmp_path, **uneven, total_training_steps=4)
    with (tmp_path / "runs/run/metrics.jsonl").open("a") as f:
        f.write('{"step": 5, "actor/pg_loss": 7.0}\n{"step": 6, "actor/pg')
    resumed = run(demo, tmp_path, **uneven)
    assert "global_step_4" in resumed.out and [r["step"] for r in resumed.rows] == [1, 2, 3, 4, 5, 6]
    for a, b in zip(metrics(one_rank), resumed.rows, strict=True):
        assert without_clock(a) == without_clock(b)
    a, b = (stored(folder / "runs/run/global_step_6/actor") for folder in (one_rank, tmp_path))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert {v.item() for name, v in b.items() if name.endswith(".step")} == {12}
    assert resumed.rows[4]["actor/lr"] == pytest.approx(5 / 10 * 5e-4, rel=1e-12)  # base 1e-6 would give 5e-7, and 1e-7 if warm-up began again
    assert [r["training/epoch"] for r in resumed.rows] == [0, 0, 1, 1, 2, 2]


def test_two_ranks_resume_on_one(demo, uneven, one_rank, two_ranks, tmp_path):
    row, = run(demo, tmp_path, **uneven, total_training_steps=3, resume_mode=two_ranks / "runs/run/global_step_2").rows
    expected = metrics(one_rank)[2]
    for key in ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "actor/kl_loss", "critic/score/mean"):
        assert row[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-5), key
    assert row["step"] == 3 and row["actor/lr"] == expected["actor/lr"]


# ---- 5. advantages and losses

def advantages(rewards, group=None, **kwargs):
    return grpo.group_advantages("grpo", torch.tensor(rewards), torch.tensor(group or [0] * len(rewards)), **kwargs)


def test_group_advantages_by_hand():
    close(advantages([0.0, 0, 0, 1]), [-0.5, -0.5, -0.5, 1.5], atol=1e-5)          # mean 1/4, sample std 1/2
    close(advantages([0.0, 0, 0, 1], norm_by_std=False), [-0.25, -0.25, -0.25, 0.75])
    close(advantages([1.0, 1, 0, 1], [0, 1, 0, 1]), [0.707107, 0, -0.707107, 0], atol=2e-6)   # groups interleaved: sample std of [1, 0] is .7071
    close(advantages([1.0, math.nan, 0, 0]), [1.154701, 0, -0.577350, -0.577350], atol=3e-6)  # of [1, 0, 0]: mean 1/3, std .57735
    assert advantages([math.nan, math.nan]).tolist() == [0, 0] and advantages([math.nan, 5.0]).tolist() == [0, 0]
    assert advantages([0.7, 0.2], [0, 1]).tolist() == [0, 0]                       # groups of one


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rewards", [[0.7] * 8, [1.1] * 10, [math.nan] + [0.1] * 6, [sum([0.1] * 3), 0.3, 0.3]])
@pytest.mark.parametrize("norm_by_std", [True, False])
def test_equal_rewards_have_no_advantage(rewards, dtype, norm_by_std):
    result = grpo.group_advantages("grpo", torch.tensor(rewards, dtype=dtype), torch.zeros(len(rewards), dtype=torch.long), norm_by_std=norm_by_std)
    assert result.dtype == torch.float64 and result.tolist() == [0] * len(rewards)


def test_group_advantages_in_any_order():
    generator = torch.Generator().manual_seed(0)
    rewards, group = torch.randn(40, generator=generator), torch.arange(40) // 5
    order = torch.randperm(40, generator=generator)
    close(grpo.group_advantages("grpo", rewards[order], group[order]), grpo.group_advantages("grpo", rewards, group)[order], rtol=1e-12)


def test_policy_loss_without_dual_clip():
    """Old probability .1, new .5, advantage -1: loss 5, capped at 3 by the dual clip."""
    logp, old = torch.log(torch.tensor([0.5])), torch.log(torch.tensor([0.1]))
    for c, expected in (0, 5), (3.0, 3):
        assert grpo.policy_loss(grpo.Args(clip_ratio_c=c), logp, old, torch.tensor([-1.0]), None, None)[0].item() == pytest.approx(expected)


def test_k3_by_hand():
    """e^-d - 1 + d at d = .5 and -.5; and no overflow at d = 40, nor at -40."""
    logp = torch.tensor([-1.0, -2.0, -5.0, -45.0], requires_grad=True)
    value = grpo.kl_penalty(logp, torch.tensor([-1.5, -1.5, -45.0, -5.0]), "low_var_kl")
    close(value.detach(), [0.106531, 0.148721, 10.0, 10.0], atol=1e-5)
    value.sum().backward()
    assert logp.grad.isfinite().all() and logp.grad[3] == 0


def from_logits(logits, labels, temperature=1.0, entropy_grad=False):
    """head_logprobs with an identity for a head."""
    return grpo.head_logprobs(logits, torch.eye(logits.shape[1], dtype=logits.dtype), None, labels, temperature, entropy_grad)


def test_head_by_hand():
    """Logits [2, 1, 0] at temperature .5: log softmax of [4, 2, 0] is -2.1429 at token 1."""
    logp, _ = from_logits(torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([1]), temperature=0.5)
    assert logp.item() == pytest.approx(-2.142932, abs=1e-5)


def test_head_with_an_impossible_token():
    """Logits [1, 2, -inf], by way of the bias: p = [.26894, .73106], entropy .58220. Its gradient is -p (log p + entropy)."""
    bias = torch.tensor([1.0, 2.0, -math.inf], requires_grad=True)
    logp, entropy = grpo.head_logprobs(torch.zeros(1, 2), torch.zeros(3, 2), bias, torch.tensor([2]), 1.0, True)
    assert logp.item() == -math.inf and entropy.item() == pytest.approx(0.582203, abs=1e-5)
    entropy.sum().backward()
    close(bias.grad, [0.196612, -0.196612, 0.0], atol=1e-5)


def test_entropy_has_a_gradient_on_demand_only():
    logits = torch.tensor([[2.0, 1.0, 0.0]], requires_grad=True)
    assert not from_logits(logits, torch.tensor([1]))[1].requires_grad
    assert from_logits(logits, torch.tensor([1]), entropy_grad=True)[1].requires_grad


# ---- 6. micro-batches

def micro_batch_worker(folder):
    """Sizes (prompt + response) of this rank's samples, and the lists they are split into."""
    rank, world, _ = grpo.init_distributed()
    found = []
    for budget, sizes in [(10, [[6] * 5, [1] * 5]), (10, [[5, 5, 5, 5], [10, 1, 9, 2]]), (7, [[], [3, 4, 7]]), (100, [[3, 4], [7]])]:
        mine = random_samples(*[(1, size - 1) for size in sizes[rank]])
        found.append(grpo.micro_batches(mine, range(len(mine)), budget))
    (folder / f"rank_{rank}.json").write_text(json.dumps(found))


def test_micro_batches_are_equally_many_on_two_ranks(tmp_path):  # fault 52
    done = fork(micro_batch_worker, tmp_path, tmp_path, ranks=2)
    assert done.codes == [0, 0], done.err
    a, b = (json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in (0, 1))
    assert a[0] == [[0], [1], [2], [3], [4]] and b[0] == [[0, 1, 2, 3, 4], [], [], [], []]   # two of 6 don't fit into 10
    assert a[1] == [[0, 1], [2, 3], []] and b[1] == [[0], [2], [3, 1]]                        # 5 + 5 fits; 10 | 9 | 2 + 1, the longest first
    assert a[2] == [[], []] and b[2] == [[2], [1, 0]]
    assert a[3] == [[1, 0]] and b[3] == [[0]]


def test_micro_batches_hold_every_row_once(process_group):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 40, (60,), generator=generator).tolist()
    samples = random_samples(*[(1, size) for size in sizes])
    for budget in (40, 64, 333, 10**6):
        lists = grpo.micro_batches(samples, range(20, 60), budget)
        assert sorted(i for rows in lists for i in rows) == list(range(20, 60))
        assert all(0 < sum(sizes[i] + 1 for i in rows) <= budget for rows in lists)


# ---- 7. it learns

def test_one_update_raises_the_rewarded_response(process_group, tmp_path):
    path, args = save_model(tmp_path, CONFIGS["llama tied"]), grpo.Args(dtype="fp32", compile="false")
    model = grpo.load_model(path, args, CPU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    samples = [Sample([5, 6, 7], [8, 9], "length", None), Sample([5, 6, 7], [10, 11, 12], "length", None)]
    before = grpo.batch_logprobs(model, samples, [0, 2, 5], args, CPU)
    adv = advantages([1.0, 0.0]).float().repeat_interleave(torch.tensor([2, 3]))
    logp, _ = model.token_logprobs(*grpo.pack(samples, CPU), 1.0)
    grpo.policy_loss(args, logp, before, adv, None, None)[0].mean().backward()
    optimizer.step()
    change = grpo.batch_logprobs(model, samples, [0, 2, 5], args, CPU) - before
    assert change[:2].sum() > 0.01 and change[2:].sum() < -0.01


def test_training_raises_the_reward(demo, tmp_path):
    """32 sums x 8 answers, 10 steps: .29 -> .46 with seed 0; .28-.31 -> .43-.44 with seeds 1, 2, 3. With the advantage's sign turned: .17 -> .02."""
    table = pq.read_table(demo / "train.parquet")
    pq.write_table(table.take(list(range(0, 352, 11))), tmp_path / "train.parquet")
    rows = run(demo, tmp_path, train_files=tmp_path / "train.parquet", train_batch_size=32, n=8, ppo_mini_batch_size=8, clip_ratio_high=0.28,
               total_training_steps=10).rows
    scores = [r["critic/score/mean"] for r in rows]
    assert statistics.mean(scores[-3:]) > statistics.mean(scores[:3]) + 0.06, scores
    assert all(r["rollout/probs_diff_max"] < 1e-4 for r in rows)  # the engine kept up with the trainer


def test_validation_by_hand(process_group):  # fault 53
    """Two prompts of one source, four answers each, one and three right: acc 1/2. pass@2: 1 - C(3,2)/C(4,2) = 1/2, and 1 - C(1,2)/C(4,2) = 1."""
    right = iter([1, 0, 0, 0, 1, 1, 0, 1])
    engine = SimpleNamespace(generate=lambda prompts, sampling, seeds: [Sample(p, [next(right)], "stop", None) for p in prompts])
    scorer = SimpleNamespace(score=lambda items: [SimpleNamespace(score=float(item["solution_str"]), error=None) for item in items])
    class Tokenizer:
        __len__ = lambda self: 2
        batch_decode = lambda self, ids, **_: [str(i[0]) for i in ids]
    prompts = [{"prompt_ids": [1], "data_source": "sums", "ground_truth": "", "extra_info": {}}] * 2
    found = grpo.validate(engine, scorer, Tokenizer(), prompts, grpo.Args(val_n=4, val_temperature=1.0), 0, 1)
    assert found == {"val/sums/acc": 0.5, "val/sums/pass@2": 0.75, "val/sums/pass@4": 1.0}


# ---- 8. bad input

@pytest.mark.parametrize("world, changed, words", [
    (1, dict(train_batch_size=10, ppo_mini_batch_size=4), ["--train_batch_size 10", "--ppo_mini_batch_size 4"]),
    (4, dict(train_batch_size=20, ppo_mini_batch_size=10), ["--ppo_mini_batch_size 10", "4 GPUs", "multiple of 4"]),
    (4, dict(tensor_model_parallel_size=3), ["--tensor_model_parallel_size 3", "4 GPUs"]),
    (1, dict(tensor_model_parallel_size=0), ["--tensor_model_parallel_size 0"]),
    (1, dict(max_tokens_per_micro_batch=700), ["--max_tokens_per_micro_batch 700", "768", "raise it"]),   # 512 + 256
    (1, dict(n=1), ["--n 1", "--n 2"]),
    (1, dict(n=0), ["--n 0"]), (1, dict(train_batch_size=0), ["--train_batch_size 0"]), (1, dict(ppo_epochs=0), ["--ppo_epochs 0"]),
    (1, dict(max_prompt_length=0), ["--max_prompt_length 0"]), (1, dict(val_n=0), ["--val_n 0"]),
    (1, dict(temperature=0.0), ["--temperature 0.0", "above 0"]),
    (1, dict(top_p=0.0), ["--top_p 0.0"]), (1, dict(top_p=1.5), ["--top_p 1.5"]), (1, dict(top_k=0), ["--top_k 0", "-1"]),
    (1, dict(gpu_memory_utilization=1.5), ["--gpu_memory_utilization 1.5"]),
    (1, dict(clip_ratio_c=1.0), ["--clip_ratio_c 1.0", "above 1"]),
    (1, dict(logger="console,wandbb"), ["--logger console,wandbb", "unknown wandbb", "tensorboard"])])
def test_check_names_option_value_and_remedy(world, changed, words):
    with pytest.raises(ValueError) as error:
        grpo.check(grpo.Args(**changed), world)
    assert all(word in str(error.value) for word in words), error.value


def test_check_adapts_and_warns(capsys):  # fault 23, 53
    args = grpo.Args(train_batch_size=8, ppo_mini_batch_size=64, val_n=4, kl_loss_coef=0.5, top_p=0.9)
    grpo.check(args, 8)
    assert args.ppo_mini_batch_size == 8 and args.val_n == 1  # four greedy answers would be four times the same
    warnings = capsys.readouterr().out
    assert all(word in warnings for word in ("--val_n 1", "--kl_loss_coef 0.5 does nothing", "ratio is biased"))
    grpo.check(grpo.Args(val_n=4, val_temperature=1.0, kl_loss_coef=0.5, use_kl_loss=True), 8)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("text, value", [("true", True), ("false", False), ("True", True), ("1", True), ("0", False)])
def test_booleans(text, value):
    assert grpo.parse_args(grpo.Args, ["--use_kl_loss", text]).use_kl_loss is value


def test_help_names_every_option_on_two_screens(capsys):
    with pytest.raises(SystemExit):
        grpo.parse_args(grpo.Args, ["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert all(any(f"--{name} " in line for line in lines) for name in vars(grpo.Args()))
    assert len(lines) < 110


BAD = {
    "unknown value": (dict(engine="vllmm"), ["--engine", "vllmm", "hf"]),
    "unknown option": (dict(learning_rate=1), ["--learning_rate"]),
    "no number": (dict(n="four"), ["--n", "four"]),
    "no boolean": (dict(use_kl_loss="yes"), ["--use_kl_loss", "yes", "true"]),
    "no GPU": (dict(offload_policy="true"), ["--offload_policy true"]),
    "not divisible": (dict(train_batch_size=10, ppo_mini_batch_size=4), ["--train_batch_size 10", "--ppo_mini_batch_size 4"]),
    "no model": (dict(model_path="no/such/model"), ["--model_path no/such/model"]),
    "no hub model": (dict(model_path="nobody/such-model"), ["--model_path nobody/such-model"]),
    "too long": (dict(max_response_length=1000), ["--max_response_length 1000", "1024 positions"]),
    "no data": (dict(train_files="no_such.parquet"), ["no_such.parquet"]),
    "too few rows": (dict(train_batch_size=400, ppo_mini_batch_size=8), ["353 rows", "400"]),
    "no reward file": (dict(reward_fn="no_such.py:reward"), ["--reward_fn no_such.py:reward"]),
    "no reward name": (dict(reward_fn="robustt"), ["--reward_fn robustt"]),
    "unknown logger": (dict(logger="console,wandbb"), ["--logger console,wandbb"]),
    "no checkpoint": (dict(resume_mode="no_such/global_step_4"), ["--resume_mode no_such/global_step_4"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_told_in_one_sentence(demo, tmp_path, name):
    changed, words = BAD[name]
    done = fork(become_script, tmp_path, options(demo, tmp_path, **({"max_tokens_per_micro_batch": 8192} | changed)))
    assert done.codes[0] > 0
    line, = done.err[0].strip().splitlines()
    assert line.startswith("grpo.py: ") and all(word in line for word in words), line


def test_unsupported_model_is_told_in_one_sentence(demo, tmp_path):
    path = save_model(tmp_path / "model", GraniteConfig(**{**SIZE, "vocab_size": 107}, logits_scaling=8.0))
    AutoTokenizer.from_pretrained(demo / "model").save_pretrained(path)
    done = fork(become_script, tmp_path, options(demo, tmp_path, model_path=path, max_response_length=10))
    assert done.codes[0] > 0 and "Traceback" not in done.err[0]
    assert "GraniteForCausalLM" in done.err[0].strip().splitlines()[-1]


def test_bad_input_is_told_once(demo, tmp_path):  # fault 23
    done = fork(become_script, tmp_path, options(demo, tmp_path, train_batch_size=9, ppo_mini_batch_size=3), ranks=2)
    assert min(done.codes) > 0
    assert len(done.err[0].strip().splitlines()) == 1 and "--ppo_mini_batch_size 3 can't be split over 2 GPUs" in done.err[0]
    assert done.err[1] == ""


@pytest.mark.parametrize("kind, expected", [("constant", [0.5, 1, 1, 1, 1, 1]), ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25]),
                                            ("cosine", [0.5, 1, 1, 0.853553391, 0.5, 0.146446609])])  # (1 + cos(pi k / 4)) / 2
def test_learning_rate(kind, expected):
    """2 steps of warm-up, then 4 steps on the way down to 0 at a seventh step."""
    args = grpo.Args(lr=1.0, warmup_steps=2, lr_scheduler_type=kind)
    close([grpo.learning_rate(args, step, 6) for step in range(1, 7)], expected)
