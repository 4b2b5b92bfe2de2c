"""Both engines against the trainer and against a model whose distribution is known by hand.

vLLM runs in a child process (this file with an argument), which writes what it got as JSON; the tests judge it here.
"""
import dataclasses
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import grpo
import rollout
from prepare_data import demo_tokenizer
from rollout import HFEngine, Sampling

torch.set_num_threads(1)  # the models are tiny: more threads wait for each other

VOCAB, HIDDEN = 112, 128                                  # the tokenizer has 107 ids, the model a few rows more
PAD, EOS, EXTRA_EOS, CALLERS_EOS = 0, 2, 50, 51           # the model's files name the first three, the caller all
MODELS = {"llama tied": 1.0, "llama untied": 1.0, "qwen2 tied": 0.7, "qwen2 untied": 1.0}  # name: temperature
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")

# ---- tiny models

def save_model(path, name, edit=lambda model: None, **generation):
    """A random model with the demo tokenizer. edit(model) changes its weights; generation: fields of generation_config.json."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
    kind, tied = name.split()
    config_class, model_class = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}[kind]
    torch.manual_seed(0)
    model = model_class(config_class(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512, initializer_range=0.1, rms_norm_eps=1e-12, tie_word_embeddings=tied == "tied",
        bos_token_id=1, eos_token_id=EOS, pad_token_id=PAD))
    for key, parameter in model.named_parameters():
        if key.endswith("bias"):  # zero by default: a bias that isn't sent would not show
            parameter.data.normal_(std=0.3)
    edit(model)
    model.save_pretrained(path)
    demo_tokenizer().save_pretrained(path)
    (Path(path) / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": [EOS, EXTRA_EOS], "pad_token_id": PAD, **generation}))
    return model


LEAK = {"do_sample": True, "temperature": 0.3, "top_k": 3, "top_p": 0.5, "repetition_penalty": 1.7, "min_new_tokens": 9, "max_new_tokens": 2}

# Next-token logits after a token; all others are 30 below.
SURE = {10: 11, 11: 12, 12: EOS, EOS: 13, 20: 21, 21: 22, 22: 23, 23: 24, 30: PAD, PAD: 31, 31: EOS, 40: 41, 41: EXTRA_EOS, EXTRA_EOS: 42, 42: 43, 46: CALLERS_EOS,
        CALLERS_EOS: 13, 13: 13}
TABLE = {token: {then: 0.0} for token, then in SURE.items()} | {
    60: {61: 2.0, 62: 1.0, 63: 0.0},
    70: {71: math.log(0.5), 72: math.log(0.3), 73: math.log(0.15), 74: math.log(0.05)}}


def without_memory(model):
    """Layers that add nothing; token t is the t-th unit vector and column t of the head holds TABLE[t]."""
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()
    model.model.embed_tokens.weight.data = torch.eye(VOCAB, HIDDEN)
    head = torch.zeros(VOCAB, HIDDEN)
    for token, row in TABLE.items():
        head[:, token] = -30
        for then, logit in row.items():
            head[then, token] = logit
    model.lm_head.weight.data = head / HIDDEN**0.5   # the norm makes a unit vector sqrt(H) long


# Prompt, then the response with EOS on and off, at most 4 tokens. PAD is a token like others, EOS is kept, a cut response stays as it is.
CHAINS = [
    ([10], [11, 12, EOS], "stop", [11, 12, EOS, 13]),
    ([5, 6, 20], [21, 22, 23, 24], "length", [21, 22, 23, 24]),
    ([5, 30], [PAD, 31, EOS], "stop", [PAD, 31, EOS, 13]),
    ([5, 5, 5, 5, 40], [41, EXTRA_EOS], "stop", [41, EXTRA_EOS, 42, 43]),
    ([46], [CALLERS_EOS], "stop", [CALLERS_EOS, 13, 13, 13]),
    ([12], [EOS], "stop", [EOS, 13, 13, 13])]

# Sampling, last prompt token, the distribution by hand.
DISTRIBUTIONS = [
    (dict(), 70, {71: 0.5, 72: 0.3, 73: 0.15, 74: 0.05}),
    (dict(temperature=0.5), 60, {61: 0.866814, 62: 0.117310, 63: 0.015876}),   # softmax of [4, 2, 0]: log .11731 = -2.1429
    (dict(top_k=2), 60, {61: 0.73106, 62: 0.26894}),                        # log .26894 = -1.3133
    (dict(temperature=0.5, top_k=3), 70, {71: 0.68966, 72: 0.24828, 73: 0.06207}),   # .25, .09, .0225 of .3625
    (dict(top_p=0.75), 70, {71: 0.625, 72: 0.375}),                         # the token that crosses .75 stays
    (dict(top_k=2, top_p=0.6), 70, {71: 1.0})]                              # top_k first: then .625 alone reaches .6


def make_args(engine, **options):
    return grpo.Args(engine=engine, dtype="fp32", compile="false", sleep="never", rollout_logprobs=1.0, max_num_seqs=64,
                     max_prompt_length=192, max_response_length=64, **options)


def make_engine(args, path):
    from transformers import AutoTokenizer, GenerationConfig
    generation_config = GenerationConfig(eos_token_id=[EXTRA_EOS, CALLERS_EOS])
    return grpo.build_engine(args, str(path), AutoTokenizer.from_pretrained(path), generation_config, torch.device("cpu"))


def random_prompts(count, length, seed=0):
    """Lengths length, length - 1, ..."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCAB, (length - i,), generator=generator).tolist() for i in range(count)]


def change(optimizer, seed):
    """An optimizer step along random gradients, the same on any number of ranks."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in optimizer.param_groups[0]["params"]:  # not model.parameters(): whole ones after a forward without gradient
        whole = torch.randn(parameter.shape, generator=generator)
        parameter.grad = torch.distributed.tensor.distribute_tensor(whole, parameter.device_mesh, parameter.placements)
    optimizer.step()
    optimizer.zero_grad()


def logp_error(engine, model, args, prompts, seeds, max_tokens=8):
    """Sample, and compare the engine's log-probs with the trainer's: largest difference, and the samples."""
    samples = engine.generate(prompts, Sampling(temperature=args.temperature, max_tokens=max_tokens), seeds)
    lengths = torch.tensor([len(s.response_ids) for s in samples])
    trainer = grpo.batch_logprobs(model, samples, [0, *lengths.cumsum(0).tolist()], args, torch.device("cpu"))
    return (trainer - torch.tensor([x for s in samples for x in s.logp])).abs().max().item(), samples


# ---- the child processes

def vllm_worker(folder):
    """Each model: three weight changes. Then a fresh engine, the distributions and the chains. Old engines stay alive: vLLM's
    state is global, and the end of one engine takes it from the others."""
    grpo.init_distributed()
    result, alive, prompts = {}, [], random_prompts(6, 160)
    as_json = lambda samples: [dataclasses.asdict(s) for s in samples]
    for name, temperature in MODELS.items():
        args, path = make_args("vllm", temperature=temperature), folder / name.replace(" ", "_")
        save_model(path, name, **LEAK)
        engine = make_engine(args, path)
        model = grpo.load_model(path, args, torch.device("cpu"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
        alive.append(engine)
        out = result[name] = {"stale": [], "synced": [], "watched": sorted(engine.read(list(rollout.watched(model))))}
        for step in range(3):
            change(optimizer, step)
            out["stale"].append(logp_error(engine, model, args, prompts, list(range(6)))[0])
            engine.update_weights(model)
            out["synced"].append(logp_error(engine, model, args, prompts, list(range(6)))[0])
        if name == "llama tied":
            result["block_size"] = engine.llm.llm_engine.vllm_config.cache_config.block_size
            change(optimizer, 3)
            greedy = Sampling(temperature=0, max_tokens=12)
            engine.generate(prompts, greedy, list(range(6)))
            rollout.send_weights(model, torch.float32, torch.device("cpu"),
                                 lambda stream: engine.llm.apply_model(lambda m: len(m.load_weights(stream))), engine.read)
            result["cache kept"] = logp_error(engine, model, args, prompts, list(range(6)))[0]
            engine.update_weights(model)
            result["synced greedy"] = as_json(engine.generate(prompts, greedy, list(range(6))))
            weights = dict(rollout.full_weights(model, torch.float32, "cpu"))  # a tied head comes once
            save_model(folder / "fresh", name, lambda fresh: fresh.load_state_dict(weights, strict=False))
            alive.append(make_engine(args, folder / "fresh"))
            result["fresh greedy"] = as_json(alive[-1].generate(prompts, greedy, list(range(6))))
            draw = lambda seeds, which=prompts: [s.response_ids for s in engine.generate(which, Sampling(max_tokens=12), seeds)]
            result["seeds"] = {"first": draw([7, 8, 9, 10, 11, 12]), "again": draw([7, 8, 9, 10, 11, 12]), "others": draw([17, 18, 19, 20, 21, 22]),
                               "copies": draw([1, 2, 3, 4], prompts[:1] * 4), "alone": draw([10], prompts[3:4]), "none": draw([], [])}
    save_model(folder / "table", "llama untied", without_memory, **LEAK)
    engine = make_engine(make_args("vllm"), folder / "table")
    result["chains"] = [as_json(engine.generate([p for p, *_ in CHAINS], Sampling(max_tokens=4, ignore_eos=ignore), list(range(6)))) for ignore in (False, True)]
    result["draws"] = [as_json(engine.generate([[token]] * 800, Sampling(max_tokens=1, **options), list(range(800)))) for options, token, _ in DISTRIBUTIONS]
    engine.sleep()  # nothing to give back on a CPU, but it must not fail
    (folder / "result.json").write_text(json.dumps(result))
    engine.shutdown()


def tp_worker(folder):
    """Two ranks share one engine. They bring 3 and 2 prompts."""
    rank, world, device = grpo.init_distributed()
    args = make_args("vllm", tensor_model_parallel_size=2)
    prompts = random_prompts(5, 24)[3 * rank:3 + 2 * rank]
    engine = make_engine(args, folder / "model")
    model = grpo.load_model(folder / "model", args, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    result = {"errors": [], "embedding_arrived": [], "watched": sorted(engine.read(list(rollout.watched(model)))), "expected_prompts": prompts}
    for step in range(3):
        change(optimizer, step)
        engine.update_weights(model)
        embedding = optimizer.param_groups[0]["params"][0].full_tensor()
        result["embedding_arrived"].append(engine.read(["model.embed_tokens.weight"])["model.embed_tokens.weight"] == rollout.checksum(embedding))
        error, samples = logp_error(engine, model, args, prompts, [100 * rank + i for i in range(len(prompts))])
        result["errors"].append(error)
    result["samples"] = [dataclasses.asdict(s) for s in samples]
    (folder / f"rank_{rank}.json").write_text(json.dumps(result))
    engine.shutdown()


def helper_worker(folder):
    """One engine against two on the same device, the second in a process of its own: the same samples, and its weights follow."""
    grpo.init_distributed()
    args, prompts, seeds = make_args("vllm", engines_per_gpu=2), random_prompts(7, 40), list(range(7))
    engine, model = make_engine(args, folder / "model"), grpo.load_model(folder / "model", args, torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    result = {"stale": [], "synced": [], "same": []}
    for step in range(3):
        change(optimizer, step)
        result["stale"].append(logp_error(engine, model, args, prompts, seeds)[0])
        engine.update_weights(model)
        error, samples = logp_error(engine, model, args, prompts, seeds)
        result["synced"].append(error)
        result["same"].append([s.response_ids for s in samples] == [s.response_ids for s in engine.generate_here(prompts, Sampling(max_tokens=8), seeds)])
    result["prompts"] = [s.prompt_ids for s in samples] == prompts
    result["few"] = [len(engine.generate(prompts[:n], Sampling(max_tokens=2), seeds[:n])) for n in (0, 1, 2)]
    (folder / "result.json").write_text(json.dumps(result))
    engine.shutdown()


def run_script(*command, ok=True, cwd=None):
    """Run python with a clean torchrun environment; the finished process. ok: it must succeed."""
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {k: v for k, v in os.environ.items() if k not in launcher} | {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *map(str, command)], env=env, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 or not ok, done.stderr[-4000:]
    return done


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm")
    run_script(__file__, "vllm_worker", folder)
    return json.loads((folder / "result.json").read_text())


@pytest.fixture(scope="module")
def process_group():
    """One process of its own, for the trainer's model in this process."""
    before, mine = dict(os.environ), not dist.is_initialized()
    if mine:
        grpo.init_distributed()
    yield
    if mine:
        dist.destroy_process_group()
        os.environ.clear()
        os.environ.update(before)


# ---- vLLM holds the trainer's weights

@needs_vllm
@pytest.mark.parametrize("name", MODELS)
def test_vllm_logp_equals_the_trainers_after_each_sync(vllm, name):
    assert max(vllm[name]["synced"]) < 1e-4, vllm[name]
    assert min(vllm[name]["stale"]) > 0.1, vllm[name]  # without the sync it shows


@needs_vllm
@pytest.mark.parametrize("name", MODELS)
def test_vllm_sync_compares_embedding_head_norm_and_projection(vllm, name):
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight", "model.layers.1.mlp.down_proj.weight"} <= set(vllm[name]["watched"])


@needs_vllm
def test_vllm_prefix_cache_would_be_stale(vllm):  # fault 46
    assert 160 > vllm["block_size"]  # only whole blocks are cached: the prompts above have one
    assert vllm["cache kept"] > 1e-2


@needs_vllm
def test_vllm_greedy_after_sync_equals_a_fresh_engine(vllm):
    for synced, fresh in zip(vllm["synced greedy"], vllm["fresh greedy"], strict=True):
        assert synced["response_ids"] == fresh["response_ids"] and synced["finish_reason"] == fresh["finish_reason"]
        assert synced["logp"] == pytest.approx(fresh["logp"], abs=1e-3)


@needs_vllm
def test_vllm_seeds(vllm):
    seeds = vllm["seeds"]
    assert seeds["first"] == seeds["again"]
    assert all(a != b for a, b in zip(seeds["first"], seeds["others"]))
    assert len(set(map(tuple, seeds["copies"]))) == 4
    assert seeds["alone"] == seeds["first"][3:4]  # whatever else is in the batch
    assert seeds["none"] == []


@needs_vllm
def test_vllm_tensor_parallel_ranks_answer_their_own_prompts(tmp_path):
    save_model(tmp_path / "model", "qwen2 tied")
    run_script(*TORCHRUN, __file__, "tp_worker", tmp_path)
    ranks = [json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in (0, 1)]
    assert [len(rank["samples"]) for rank in ranks] == [3, 2]
    for rank in ranks:
        assert max(rank["errors"]) < 1e-4 and rank["embedding_arrived"] == [True] * 3
        assert [s["prompt_ids"] for s in rank["samples"]] == rank["expected_prompts"]
        assert {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight", "model.layers.1.mlp.down_proj.weight"} <= set(rank["watched"])


# ---- both engines on the table

def check_chains(with_eos, ignoring_eos):
    for (prompt, response, reason, endless), ended, ignored in zip(CHAINS, with_eos, ignoring_eos, strict=True):
        assert (ended["prompt_ids"], ended["response_ids"], ended["finish_reason"]) == (prompt, response, reason)
        assert (ignored["prompt_ids"], ignored["response_ids"], ignored["finish_reason"]) == (prompt, endless, "length")
        assert ended["logp"] == pytest.approx([0.0] * len(response), abs=1e-4) and len(ignored["logp"]) == 4


def check_distribution(samples, expected):
    """Log-probs as computed by hand; frequencies by the chi-square test at 0.1 %."""
    drawn = [s["response_ids"][0] for s in samples]
    assert set(drawn) <= set(expected)
    for s in samples:
        assert s["logp"] == pytest.approx([math.log(expected[s["response_ids"][0]])], abs=2e-4)
    chi2 = sum((drawn.count(token) - len(drawn) * p) ** 2 / (len(drawn) * p) for token, p in expected.items())
    assert chi2 < {1: 1e-9, 2: 10.83, 3: 13.82, 4: 16.27}[len(expected)]


@needs_vllm
def test_vllm_helper_processes_share_the_prompts(tmp_path):
    save_model(tmp_path / "model", "qwen2 tied" if "qwen2 tied" in MODELS else next(iter(MODELS)))
    run_script(__file__, "helper_worker", tmp_path)
    result = json.loads((tmp_path / "result.json").read_text())
    assert max(result["synced"]) < 1e-4 and min(result["stale"]) > 0.1, result
    assert result["same"] == [True] * 3 and result["prompts"] and result["few"] == [0, 1, 2]


@needs_vllm
def test_vllm_lengths_and_finish_reasons(vllm):
    check_chains(*vllm["chains"])


@needs_vllm
@pytest.mark.parametrize("case", range(len(DISTRIBUTIONS)))
def test_vllm_samples_what_the_caller_says(vllm, case):
    check_distribution(vllm["draws"][case], DISTRIBUTIONS[case][2])


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    path = tmp_path_factory.mktemp("table")
    save_model(path, "llama untied", without_memory, **LEAK)
    return path


@pytest.mark.parametrize("pad_id", [PAD, EOS])
@pytest.mark.parametrize("max_num_seqs", [1, 2, 64])
def test_hf_lengths_and_finish_reasons(table, pad_id, max_num_seqs):  # fault 26, 27, 29
    engine = HFEngine(table, dtype=torch.float32, device=torch.device("cpu"), max_num_seqs=max_num_seqs, eos_ids=[EOS, EXTRA_EOS, CALLERS_EOS], pad_id=pad_id, logprobs=1.0)
    for temperature in (1.0, 0.0):
        check_chains(*([dataclasses.asdict(s) for s in engine.generate(
            [p for p, *_ in CHAINS], Sampling(temperature=temperature, max_tokens=4, ignore_eos=ignore), list(range(6)))] for ignore in (False, True)))


@pytest.mark.parametrize("options, token, expected", DISTRIBUTIONS)
def test_hf_samples_what_the_caller_says(table, options, token, expected):  # fault 48, 49
    engine = make_engine(make_args("hf"), table)
    engine.max_num_seqs = 4000
    draw = lambda seeds: [dataclasses.asdict(s) for s in engine.generate([[token]] * 4000, Sampling(max_tokens=1, **options), seeds)]
    first = draw(list(range(4000)))
    check_distribution(first, expected)
    assert first == draw(list(range(4000)))
    assert len(expected) == 1 or first != draw(list(range(4000, 8000)))


# ---- Hugging Face engine against the trainer

@pytest.mark.parametrize("name", MODELS)
def test_hf_logp_equals_the_trainers_after_each_sync(process_group, tmp_path, name):
    save_model(tmp_path, name, **LEAK)
    args, prompts = make_args("hf", temperature=MODELS[name]), random_prompts(6, 20)
    engine, model = make_engine(args, tmp_path), grpo.load_model(tmp_path, args, torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    for step in range(3):
        change(optimizer, step)
        assert logp_error(engine, model, args, prompts, list(range(6)))[0] > 0.1
        engine.update_weights(model)
        error, samples = logp_error(engine, model, args, prompts, list(range(6)))
        assert error < 1e-5
        assert max(len(s.response_ids) for s in samples) == 8  # not max_new_tokens of generation_config


def test_hf_greedy_is_the_argmax(tmp_path):
    model, prompts = save_model(tmp_path, "llama untied", **LEAK), random_prompts(4, 12)
    samples = make_engine(make_args("hf"), tmp_path).generate(prompts, Sampling(temperature=0, max_tokens=10, ignore_eos=True), list(range(4)))
    for prompt, sample in zip(prompts, samples, strict=True):
        ids = list(prompt)
        for _ in range(10):
            logits = model(torch.tensor([ids])).logits[0, -1]
            ids.append(int(logits.argmax()))
        assert sample.response_ids == ids[len(prompt):]


def test_hf_response_depends_on_its_own_seed_only(tmp_path):
    save_model(tmp_path, "llama tied")
    engine, prompts = make_engine(make_args("hf"), tmp_path), random_prompts(5, 16)
    draw = lambda which, seeds: [s.response_ids for s in engine.generate(which, Sampling(max_tokens=12), seeds)]
    together = draw(prompts, [3, 4, 5, 6, 7])
    assert together == draw(prompts, [3, 4, 5, 6, 7])
    assert [draw([p], [s])[0] for p, s in zip(prompts, [3, 4, 5, 6, 7])] == together
    assert all(a != b for a, b in zip(together, draw(prompts, [13, 14, 15, 16, 17])))
    assert len(set(map(tuple, draw(prompts[:1] * 4, [1, 2, 3, 4])))) == 4
    engine.max_num_seqs = 2
    assert draw(prompts, [3, 4, 5, 6, 7]) == together
    assert draw([], []) == []


# ---- the parts

def test_filtered_logp_by_hand():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    assert rollout.filtered_logp(logits, Sampling())[0, 1].item() == pytest.approx(-1.40761, abs=1e-5)
    assert rollout.filtered_logp(logits, Sampling(temperature=0.5))[0, 1].item() == pytest.approx(-2.14293, abs=1e-5)
    assert rollout.filtered_logp(logits, Sampling(top_k=2))[0].tolist() == pytest.approx([-0.31326, -1.31326, -math.inf], abs=1e-5)
    assert rollout.filtered_logp(logits, Sampling(temperature=0))[0, 1].item() == pytest.approx(-1.40761, abs=1e-5)  # greedy: as at temperature 1
    assert rollout.filtered_logp(logits, Sampling(top_k=3))[0].tolist() == rollout.filtered_logp(logits, Sampling(top_k=99))[0].tolist()
    assert rollout.filtered_logp(logits, Sampling(top_p=0.01))[0].tolist() == [0.0, -math.inf, -math.inf]  # one token always stays


def test_request_seeds_do_not_depend_on_the_ranks():
    seeds = rollout.request_seeds(0, 1, 8)
    assert seeds == rollout.request_seeds(0, 1, 8) and len(set(seeds)) == 8
    assert rollout.request_seeds(0, 1, 4) == seeds[:4]   # by position: a rank's slice is the same slice of a longer list
    assert not set(seeds) & set(rollout.request_seeds(0, 2, 8)) and not set(seeds) & set(rollout.request_seeds(1, 1, 8))
    assert all(type(s) is int and 0 <= s < 2**32 for s in seeds)


def test_eos_token_ids():
    from transformers import GenerationConfig
    tokenizer = demo_tokenizer()
    assert rollout.eos_token_ids(tokenizer, None) == [EOS]
    assert rollout.eos_token_ids(tokenizer, GenerationConfig()) == [EOS]
    assert rollout.eos_token_ids(tokenizer, GenerationConfig(eos_token_id=7)) == [EOS, 7]
    assert rollout.eos_token_ids(tokenizer, GenerationConfig(eos_token_id=[7, EOS, 5])) == [EOS, 5, 7]
    tokenizer.eos_token = None
    assert rollout.eos_token_ids(tokenizer, GenerationConfig(eos_token_id=7)) == [7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checksum(dtype):
    weight = torch.randn(6, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    total = rollout.checksum(weight)
    assert sum(rollout.checksum(part) for part in weight.chunk(2, 0)) == total == sum(rollout.checksum(part) for part in weight.chunk(2, 1))
    assert rollout.checksum(torch.cat([weight, torch.zeros(2, 8, dtype=dtype)])) == total == rollout.checksum(weight.T)
    as_int = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    for bit in range(8 * dtype.itemsize):
        changed = weight.clone()
        changed.view(as_int)[3, 5] ^= -(1 << bit) if bit == 8 * dtype.itemsize - 1 else 1 << bit
        assert rollout.checksum(changed) != total
    assert rollout.checksum(torch.tensor([1.0])) == 0x3F800000


@pytest.mark.parametrize("tied", ["tied", "untied"])
def test_a_sync_that_leaves_the_head_raises(process_group, tmp_path, tied):
    save_model(tmp_path, f"llama {tied}")
    args, cpu = make_args("hf"), torch.device("cpu")
    engine, model = make_engine(args, tmp_path), grpo.load_model(tmp_path, args, cpu)
    change(torch.optim.AdamW(model.parameters(), lr=0.03), 0)
    held = engine.model.state_dict()
    held["lm_head.weight"] = held["lm_head.weight"].clone()  # an engine that keeps a head of its own
    def load(stream):
        for name, weight in stream:
            if name != "lm_head.weight":
                held[name].copy_(weight)
    with pytest.raises(RuntimeError, match="engine's lm_head.weight differs from the trainer's " + {"tied": "model.embed_tokens", "untied": "lm_head"}[tied]):
        rollout.send_weights(model, torch.float32, cpu, load, lambda names: {n: rollout.checksum(held[n]) for n in names})
    engine.update_weights(model)


@pytest.mark.parametrize("load, held", [(list, {}), (lambda stream: None, None)])
def test_a_sync_that_can_not_be_checked_raises(process_group, tmp_path, load, held):
    save_model(tmp_path, "llama untied")
    args = make_args("hf")
    engine, model = make_engine(args, tmp_path), grpo.load_model(tmp_path, args, torch.device("cpu"))
    weights = engine.model.state_dict() if held is None else held
    with pytest.raises(RuntimeError):
        rollout.send_weights(model, torch.float32, torch.device("cpu"), load, lambda names: {n: rollout.checksum(weights[n]) for n in names if n in weights})


if __name__ == "__main__":
    {"vllm_worker": vllm_worker, "tp_worker": tp_worker, "helper_worker": helper_worker}[sys.argv[1]](Path(sys.argv[2]))
