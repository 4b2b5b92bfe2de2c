"""ppo.py: its parts by hand-computed numbers and vectors, values and scores against plain transformers, and the real script.

What of a step is more than its parts is compared with `plain_ppo_step`: PPO written once more, row by row, with loops and
nothing but transformers and torch.optim. As in test_grpo.py the script runs either as a user starts it or as `__main__` of a
forked process. Numbers such as (42) are those of a list of public faults.
"""
import copy
import json
import math
import runpy
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.distributed.run import get_args_parser
from transformers import (AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, BertConfig, GraniteConfig, LlamaConfig,
                          PreTrainedTokenizerFast)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import grpo
import ppo
from merge import merge
from prepare_data import batch_rows, demo_tokenizer, load_prompts
from rollout import Sample
from test_grpo import (CONFIGS, CPU, SIZE, VECTORS, close, environment, fork, metrics, random_samples, row_logprobs, save_model, stored,  # noqa: F401
                       tensor, without_clock)
from test_rollout import TORCHRUN, process_group, run_script  # noqa: F401

SCRIPT = Path(ppo.__file__)
both_copies = pytest.mark.parametrize("script", [grpo, ppo], ids=["grpo", "ppo"])  # of a helper that stands in both scripts


# ---- the real script

def become_script(argv):
    sys.argv = [str(SCRIPT), *argv]
    runpy.run_path(str(SCRIPT), run_name="__main__")


def options(demo, folder, **changed):
    """The command line of a short run on the demo: 8 responses a step, about half of them cut at 4 tokens."""
    given = dict(train_files=demo / "train.parquet", val_files="", model_path=demo / "model", engine="hf", n=2, train_batch_size=4, max_prompt_length=32,
                 max_response_length=4, max_tokens_per_micro_batch=4096, temperature=1.5, lr=1e-3, critic_lr=1e-2, val_before_train="false", test_freq=0,
                 save_freq=0, logger="jsonl", dump_rollouts=64, default_local_dir=folder, project_name="runs", experiment_name="run") | changed
    return [str(x) for key, value in given.items() for x in (f"--{key}", value)]


def run(demo, folder, ranks=1, **changed):
    """A run that must succeed -> rows of its metrics.jsonl, its folder, what it printed."""
    folder.mkdir(exist_ok=True)
    done = fork(become_script, folder, options(demo, folder, **changed), ranks=ranks)
    assert done.codes == [0] * ranks, done.err[0][-4000:]
    return SimpleNamespace(rows=metrics(folder), path=folder / "runs/run", out=done.out[0], err=done.err[0])


def dumped(folder, step):
    """What the first rank wrote of a step's responses."""
    return [json.loads(line) for line in (folder / f"runs/run/rollouts/step_{step}.jsonl").read_text().splitlines()]


def rows_of_step(demo, step, files=None, n=2, batch=4, longest=32):
    """The training rows that a step's responses answer, one a response."""
    train = load_prompts(files or demo / "train.parquet", AutoTokenizer.from_pretrained(demo / "model"), longest)
    return [train[i] for i in batch_rows(len(train), batch, 0, step - 1) for _ in range(n)]


REWARD = """
def reward(data_source, solution_str, ground_truth, extra_info):
    total = sum(map(ord, solution_str))
    if total % 5 == 0:
        raise ValueError("no score for this one")
    return total % 5

def cost(data_source, solution_str, ground_truth, extra_info):
    if solution_str[-1:] in "147":
        raise ValueError("no cost of this one")
    return len(solution_str) - 6.5

def broken(**item):
    raise ValueError("never a score")

def long(solution_str, **item):
    return float(len(solution_str) > 6)
"""
exec(REWARD)


def judged(function, text):
    """What one of these functions says of a response, NaN where it raises."""
    try:
        return float(function("", text, "", {}))
    except ValueError:
        return math.nan


@pytest.fixture(scope="module")
def reward_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "reward.py"
    path.write_text(REWARD)
    return path


# ---- models with a scalar head

def save_value_model(path, config, tokenizer=None, **changed):
    """A random sequence classification model with one label: head, biases and all."""
    config = copy.deepcopy(config)
    for key, value in ({"num_labels": 1} | changed).items():
        setattr(config, key, value)
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or name == "score.weight":
            parameter.data.normal_(std=0.3)
    model.save_pretrained(path)
    if tokenizer is not None:
        tokenizer.save_pretrained(path)
    return path


def row_values(model, sample):
    """The head at the places whose logits predict the response tokens, by transformers' backbone on one row: (r,)."""
    hidden = model.base_model(torch.tensor([sample.prompt_ids + sample.response_ids])).last_hidden_state[0]
    return model.score(hidden)[len(sample.prompt_ids) - 1:-1, 0]


def own_score(model, ids):
    """Transformers' own forward on one row alone."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, 0].item()


JUDGE = dict(SIZE, vocab_size=120)  # the demo's tokenizer has 109 ids


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    """With the actor's tokenizer."""
    return save_value_model(tmp_path_factory.mktemp("reward_model"), LlamaConfig(**JUDGE), demo_tokenizer())


def other_tokenizer():
    """Another vocabulary, in another order, and another template: made in the way of prepare_data.demo_tokenizer."""
    from tokenizers import Tokenizer, decoders, models

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[USER]", "[BOT]"]
    characters = Tokenizer(models.BPE({token: i for i, token in enumerate(special + sorted("+0123456789#? abcdefghijklmnopqrstuvwxyz", reverse=True))}, merges=[],
                                      unk_token="[UNK]"))
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", eos_token="[SEP]",
                                        additional_special_tokens=special[4:])
    tokenizer.chat_template = "[CLS]{% for m in messages %}{{ ('[BOT]' if m.role == 'assistant' else '[USER]') + m.content + '[SEP]' }}{% endfor %}"
    return tokenizer


@pytest.fixture(scope="module")
def other_reward_model(tmp_path_factory):
    """With a tokenizer and a chat template of its own."""
    return save_value_model(tmp_path_factory.mktemp("other_reward_model"), LlamaConfig(**JUDGE), other_tokenizer())


def conversation(tokenizer, row, record):
    """A training row and what the script wrote of a response, as a judge's own tokenizer gives them."""
    return tokenizer.apply_chat_template([*row["prompt"], {"role": "assistant", "content": record["response"]}], return_dict=True)["input_ids"]


# ---- 1. vectors: [row][column] with a mask, packed by the mask

def cases(file):
    return [pytest.param(case, id=f"{file}-{case['name']}") for case in json.loads((VECTORS / f"{file}.json").read_text())["cases"]]


layouts = pytest.mark.parametrize("layout", ["whole", "row by row"])


def parts(mask, layout):
    """The mask, or its rows one by one: micro-batches."""
    return [mask] if layout == "whole" else [mask & (torch.arange(len(mask)) == i)[:, None] for i in range(len(mask))]


def aggregate(token_losses, given, mask, layout):
    """token_losses(part of the mask) -> losses, metrics. Their aggregated loss and metrics' token means over all parts."""
    totals, lengths = given.get("global_batch_info", {}), mask.sum(1)
    weights = ppo.loss_weights(lengths, given["loss_agg_mode"], totals.get("batch_num_tokens", int(lengths.sum())), totals.get("global_batch_size", int((lengths > 0).sum())),
                               totals.get("loss_scale_factor") or mask.shape[1])
    loss, means = 0.0, defaultdict(float)
    for part in parts(mask, layout):
        losses, found = token_losses(part)
        loss = loss + (losses * weights.repeat_interleave(part.sum(1))).sum() * totals.get("dp_size", 1)
        for key, value in found.items():
            means[key] += value.detach().double().sum() / max(1, int(mask.sum()))
    return loss, means


@layouts
@pytest.mark.parametrize("case", cases("policy_loss_ppo"))
def test_policy_loss(case, layout):
    given, expected = case["inputs"], case["expected"] | case.get("verl_2026_08", {})
    mask, logp = tensor(given["response_mask"]).bool(), tensor(given["log_prob"]).requires_grad_()
    old_logp, advantages = tensor(given["old_log_prob"]), tensor(given["advantages"])
    weights = tensor(given["rollout_is_weights"]) if "rollout_is_weights" in given else torch.ones_like(advantages)  # not in ppo.py: a factor here

    def token_losses(part):
        losses, found = ppo.policy_loss(logp[part], old_logp[part], advantages[part], given["clip_ratio_low"], given["clip_ratio_high"], given["clip_ratio_c"])
        return losses * weights[part], found
    loss, means = aggregate(token_losses, given, mask, layout)
    loss.backward()
    wanted = tensor(expected["loss"])
    if not mask.any():
        wanted = torch.tensor(0.0)  # 0 / 0 in verl
    elif logp.isnan().any():
        wanted = tensor(case["paper"]["loss_dual_clip"])  # NaN on padding, of which packed tokens have none
    close(loss.detach(), wanted)
    close(logp.grad, torch.where(mask, tensor(expected["grad_log_prob"]), 0.0))
    for key in ("pg_clipfrac", "pg_clipfrac_lower", "ppo_kl"):
        close(means[key], tensor(expected[key]))
    standard, _ = aggregate(lambda part: ppo.policy_loss(logp[part], old_logp[part], advantages[part], given["clip_ratio_low"], given["clip_ratio_high"], 0), given, mask, layout)
    paper = case.get("paper", {})
    if plain := [paper[key] for key in ("loss_standard_clip_no_dual", "loss_standard_clip_no_dual_mean_over_non_empty_rows") if key in paper]:
        close(standard.detach(), tensor(plain[0])) if "rollout_is_weights" not in given else None


@layouts
@pytest.mark.parametrize("case", cases("value_loss"))
def test_value_loss(case, layout):
    given, expected = case["inputs"], case["expected"] | case.get("verl_2026_08", {})
    mask, values = tensor(given["response_mask"]).bool(), tensor(given["vpreds"]).requires_grad_()
    old, returns = tensor(given["values"]), tensor(given["returns"])
    loss, means = aggregate(lambda part: ppo.value_loss(values[part], old[part], returns[part], given["cliprange_value"]), given, mask, layout)
    loss.backward()
    close(loss.detach(), tensor(expected["vf_loss"]) if mask.any() else torch.tensor(0.0))  # 0 / 0 in verl
    close(means["vf_clipfrac"], tensor(expected["vf_clipfrac"]))
    if "grad_vpreds" in expected:
        close(values.grad, tensor(expected["grad_vpreds"]))
    close(means["vpred_mean"], values.detach()[mask].sum() / max(1, int(mask.sum())))


@both_copies
@layouts
@pytest.mark.parametrize("case", cases("agg_loss"))
def test_loss_weights(script, case, layout):
    """A fractional mask is a weight of its own; lengths are then its sums."""
    given, wanted = case["inputs"], case["expected"] | case.get("verl_2026_08", {}) | case.get("paper", {})
    losses, mask = tensor(given["loss_mat"]), tensor(given["loss_mask"])
    lengths = mask.sum(1)
    tokens, rows = given.get("batch_num_tokens", float(mask.sum())), given.get("global_batch_size", int((lengths > 0).sum()))
    weights = script.loss_weights(lengths, given["loss_agg_mode"], tokens, rows, given.get("loss_scale_factor") or losses.shape[1])
    total = sum((weights[:, None] * losses * torch.where(part, mask, 0.0)).sum() for part in parts(mask > 0, layout))
    close(total * given.get("dp_size", 1), tensor(wanted["loss"]))


@pytest.mark.parametrize("case", cases("gae"))
def test_gae(process_group, case):
    """Whitened where verl can: of one valid token it raises, ours is 0; the advantages themselves are defined anyway."""
    given, mask = case["inputs"], tensor(case["inputs"]["response_mask"]).bool()
    advantages, returns = ppo.gae(tensor(given["token_level_rewards"])[mask], tensor(given["values"])[mask], mask.sum(1), given["gamma"], given["lam"])
    close(advantages, tensor(case["paper"]["advantages_unwhitened"])[mask])
    close(returns, tensor(case["paper"]["returns"])[mask])
    whitened = ppo.whiten(advantages)
    close(whitened, torch.zeros(int(mask.sum())) if "raises" in case["expected"] else tensor(case["expected"]["advantages"])[mask])


@pytest.mark.parametrize("case", cases("masked_whiten"))
def test_whiten(process_group, case):
    """verl divides by n + 1e-8: its mean is off by 1e-8 of itself, and so is what is whitened, by more where the variance is small."""
    given = case["inputs"]
    values, mask = tensor(given["values"]), tensor(given["mask"]).bool()
    if "axis" in given:
        return close(ppo.row_means(values[mask], mask.sum(1)), tensor(case["expected"]["mean"]), atol=1e-7)
    chosen, whitened = values[mask], ppo.whiten(values[mask], given["shift_mean"])
    if len(chosen) < 2 or (chosen == chosen[0]).all():  # verl raises, or keeps 7e-5 of that error
        return close(whitened, torch.zeros(len(chosen)) if given["shift_mean"] else chosen)
    close(whitened, tensor(case["expected"]["whitened"])[mask], atol=1e-7)


@both_copies
@pytest.mark.parametrize("case", cases("kl_penalty"))
def test_kl_penalty(script, case):
    given, wanted = case["inputs"], case.get("verl_2026_08", case["expected"])
    logp = tensor(given["logprob"]).requires_grad_()
    if "raises" in wanted:
        with pytest.raises((NotImplementedError, KeyError)):
            script.kl_penalty(logp, tensor(given["ref_logprob"]), given["kl_penalty"])
        return
    value = script.kl_penalty(logp, tensor(given["ref_logprob"]), given["kl_penalty"])
    value.sum().backward()
    close(value.detach(), tensor(wanted["kl"]))
    close(logp.grad, tensor(wanted["grad_of_sum_wrt_logprob"]))


@pytest.mark.parametrize("case", cases("apply_kl_in_reward"))
def test_kl_in_reward(case):
    """The score of an empty response stays on padding in verl (13); here it is nowhere."""
    given, expected, controller = case["inputs"], case["expected"], case["inputs"]["controller"]
    scores, mask = tensor(given["token_level_scores"]), tensor(given["response_mask"]).bool()
    lengths = mask.sum(1)
    kl = ppo.kl_penalty(tensor(given["old_log_probs"]), tensor(given["ref_log_prob"]), given["kl_penalty"])[mask]
    last = torch.zeros(len(mask), dtype=torch.float64)
    last[lengths > 0] = scores[mask][lengths.cumsum(0)[lengths > 0] - 1]
    before_last = scores[mask].index_add(0, lengths.cumsum(0)[lengths > 0] - 1, -last[lengths > 0])  # what a vector may give on the way
    close(ppo.token_rewards(last, kl, controller["kl_coef"], lengths) + before_last, tensor(expected["token_level_rewards"])[mask])
    current = ppo.row_means(kl, lengths).mean().item()
    close(current, expected["current_kl"])
    if controller["type"] == "adaptive":
        close(ppo.next_kl_coef(controller["kl_coef"], current, len(mask), controller["target_kl"], controller["horizon"]), expected["coef_after"])


@pytest.mark.parametrize("case", cases("adaptive_kl"))
def test_adaptive_kl(case):
    """Where verl's coefficient turns negative and would reward the KL, ours is 0 and stays there. What verl raises for is a start-up error."""
    given = case["inputs"]
    if "raises" in case["expected"]:
        with pytest.raises(SystemExit if given["type"] not in ("fixed", "adaptive") else ValueError, match="--kl_horizon 0" if "horizon" in given else "2"):
            ppo.check(ppo.parse_args(ppo.Args, ["--kl_ctrl", given["type"], "--kl_horizon", str(given.get("horizon", 1))]), 1)
        return
    wanted, coef = case["expected"]["value_after_each_update"], given["kl_coef"]
    negative = next((i for i, value in enumerate(wanted) if value < 0), len(wanted))
    found = []
    for kl, count in zip(given["current_kl"], given["n_steps"]):
        coef = ppo.next_kl_coef(coef, kl, count, given["target_kl"], given["horizon"]) if given["type"] == "adaptive" else coef
        found.append(coef)
    close(found, wanted[:negative] + [0.0] * (len(wanted) - negative))


def through_head(script, logits, labels):
    """head_logprobs of logits (T, V): the identity for a head; a logit of -inf comes by way of the bias, where no 0 meets it."""
    if logits.isinf().any():
        return tuple(torch.cat(x) for x in zip(*(script.head_logprobs(torch.zeros_like(z)[None], torch.zeros(len(z), len(z), dtype=z.dtype), z, y[None], 1.0, False)
                                                 for z, y in zip(logits, labels))))
    return script.head_logprobs(logits, torch.eye(logits.shape[1], dtype=logits.dtype), None, labels, 1.0, False)


@both_copies
@pytest.mark.parametrize("case", cases("entropy"))
def test_entropy(script, case):
    given, wanted = case["inputs"], case.get("paper", case["expected"])
    logits = tensor(given["logits"])
    entropy = through_head(script, logits.flatten(0, -2), torch.zeros(logits[..., 0].numel(), dtype=torch.long))[1].reshape(logits.shape[:-1])
    if "loss_agg_mode" not in given:
        return close(entropy, tensor(wanted["entropy"]))
    mask = tensor(given["response_mask"]).bool()
    close(aggregate(lambda part: (entropy[part], {}), given, mask, "whole")[0], tensor(wanted["entropy_loss"]))


@both_copies
@pytest.mark.parametrize("case", cases("logprob_from_logits"))
def test_logprob_from_logits(script, case):
    """Of bf16 logits ours is fp32."""
    given, width = case["inputs"], case["inputs"].get("response_length", 0)
    logits, labels = tensor(given["logits"]).to(getattr(torch, given.get("dtype", "float64"))), torch.tensor(given["input_ids" if width else "labels"])
    if width:
        logits, labels = logits[:, -width - 1:-1], labels[:, -width:]
    logp, _ = through_head(script, logits.flatten(0, 1), labels.flatten())
    tolerance = {"bfloat16": 1e-2, "float32": 1e-6}.get(given.get("dtype"), 1e-7)
    close(logp.reshape(labels.shape), tensor(case.get("paper", case["expected"])["logprob"]), rtol=tolerance, atol=max(1e-8, tolerance / 10))


@pytest.mark.parametrize("case", cases("reward_zscore"))
def test_reward_zscore(process_group, case):
    """By the batch, or by batches one after the other; ours has the sample std and an epsilon of 1e-8, another one is put in place of it."""
    given, running = case["inputs"], {"count": 0, "mean": 0.0, "m2": 0.0} if case["inputs"].get("kind") == "running" else None
    rewards = next(value for value in given.values() if isinstance(value, list))
    found = defaultdict(list)
    for batch in rewards if isinstance(rewards[0], list) else [rewards]:
        z = ppo.normalize_rewards(tensor(batch), running)
        _, mean, var = ppo.moments(tensor(batch)) if running is None else (0, running["mean"], running["m2"] / max(1, running["count"] - 1))
        count = len(batch) if running is None else running["count"]
        std = math.sqrt(var if given.get("ddof", 1) else var * (count - 1) / count)
        found["normalised"].append((z * (math.sqrt(var) + 1e-8) / (std + given.get("eps", 1e-8))).tolist())
        found["mean"].append(mean)
        found["std"].append(std)
        found["count"].append(count)
    for key, value in case["expected"].items():
        name = next(n for n in found if key.startswith(n))
        flat = lambda x: [z for y in x for z in flat(y)] if isinstance(x, list) else [float(x)]  # batches may differ in length
        close(flat(found[name]), flat(value))


@pytest.mark.parametrize("case", cases("ema_reference"))
def test_ema(case):
    """OpenRLHF names the share of the old weights, TRL that of the policy; ours is the policy's."""
    given = case["inputs"]
    share = 1 - given["ema_weight_on_old"] if "ema_weight_on_old" in given else given["alpha"]
    ref, policy = (torch.nn.ParameterList([tensor(given[key])]) for key in ("ema_init", "policy_init"))
    ref.reshard = policy.reshard = lambda: None  # FSDP2's, for which test_reference_moves_whole is
    found = []
    for step in range(1, given["steps"] + 1):
        if step % given.get("every", 1) == 0:
            ppo.ema_update(ref, policy, share)
        found.append(ref[0].tolist())
        policy[0].data += given["policy_increment_per_step"]
    close(tensor(found), tensor(case["expected"]["ema_after_each_step"]))


@pytest.mark.parametrize("case", cases("safe_rlhf"))
def test_safe_rlhf(case):
    given, expected, kind = case["inputs"], case["expected"], case["inputs"]["kind"]
    if kind == "lambda_update":
        args = ppo.Args(lambda_lr=given["lambda_lr"], cost_threshold=given["threshold"], lambda_max=given["lambda_max"] or 0.0)
        log_lambda, costs, path, means = math.log(given["lambda_init"]), [], [], []
        for step, new in enumerate(given["episode_costs_per_step"], 1):  # as main does it
            costs = [*costs, *new][-given["episode_cost_window_size"]:]
            means.append(statistics.mean(costs))
            if step > given["lambda_update_delay_steps"]:
                log_lambda = ppo.next_log_lambda(log_lambda, means[-1], args)
            path.append(math.exp(log_lambda))
        close(means, expected["windowed_mean_cost"])
        close(path, expected["lambda_after_each_step"])
    elif kind == "mixed_advantage":
        close(ppo.mix_advantages(tensor(given["reward_advantages"]), tensor(given["cost_advantages"]), given["lam"]), tensor(expected["advantages"]))
    elif kind == "actor_loss":
        mask = tensor(given["mask"]).bool()
        logp, old_logp, mine, costs = (tensor(given[key]) for key in ("log_probs", "old_log_probs", "reward_advantages", "cost_advantages"))
        clip = given["clip_range_ratio"]
        token_losses = lambda part: ppo.policy_loss(logp[part], old_logp[part], ppo.mix_advantages(mine[part], costs[part], given["lam"]), clip, clip, c=0)
        for mode, key in ("seq-mean-token-mean", "loss_seq_mean_of_token_means"), ("token-mean", "loss_token_mean_for_comparison"):
            close(aggregate(token_losses, {"loss_agg_mode": mode}, mask, "whole")[0], tensor(expected[key]))
    else:  # shaping. PKU clips the sum of score and KL to +-50; ours has no such bound (--reward_clip bounds the score): clipped here
        mask = tensor(given["sequence_mask"]).bool()
        kl = ppo.kl_penalty(tensor(given["log_probs"]), tensor(given["ref_log_probs"]), "k1")[mask]
        for key, sign in ("reward", 1), ("cost", -1):
            shaped = ppo.token_rewards(tensor(given[key]), sign * kl, given["kl_coeff"], mask.sum(1))
            close(shaped.clamp(-given["clip_range_score"], given["clip_range_score"]), tensor(expected[f"{key}s"])[mask])


# ---- the same by hand

def test_gae_by_hand():
    """(42) Rewards 0 0 2, values .5 .25 .75 (and 9s beyond the end): deltas -.25 .5 1.25, discounted by .9. A hole of a masked token costs nothing."""
    rewards, values, lengths = torch.tensor([0.0, 0, 2, 0, 1]), torch.tensor([0.5, 0.25, 0.75, 0.2, 0.4]), torch.tensor([3, 0, 2])
    advantages, returns = ppo.gae(rewards, values, lengths, lam=0.9)
    close(advantages[:3], [1.2125, 1.625, 1.25], atol=1e-7)
    close(returns[:3], [1.7125, 1.875, 2.0], atol=1e-7)
    close(ppo.gae(rewards, values, lengths)[0][3:], [0.8, 0.6], atol=1e-7)
    assert [len(x) for x in ppo.gae(torch.zeros(0), torch.zeros(0), torch.tensor([0, 0]))] == [0, 0]


def test_gae_discounts():
    """Two tokens, gamma .5, lambda .25, values 1 and 2, reward 4 at the end: A_2 = 4 - 2 = 2, A_1 = .5 * 2 - 1 + .125 * 2 = .25."""
    advantages, returns = ppo.gae(torch.tensor([0.0, 4]), torch.tensor([1.0, 2]), torch.tensor([2]), 0.5, 0.25)
    close(advantages, [0.25, 2.0])
    close(returns, [1.25, 4.0])


def test_rewards_of_tokens_by_hand():
    """(43) Score 1, log-probs -1 -2, reference -1.5 -1.8, beta .1: -.05 and 1.02. (13) The score 7 of an empty response is on nobody's token."""
    kl = ppo.kl_penalty(torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.8]), "kl")
    close(ppo.token_rewards(torch.tensor([7.0, 1.0]), kl, 0.1, torch.tensor([0, 2])), [-0.05, 1.02], atol=1e-7)
    close(ppo.token_rewards(torch.tensor([1.0, 7.0]), kl, 0.1, torch.tensor([2, 0])), [-0.05, 1.02], atol=1e-7)
    close(ppo.token_rewards(torch.tensor([1.0, 7.0]), kl, 0.0, torch.tensor([1, 1])), [1.0, 7.0])
    assert ppo.Args().use_kl_in_reward and not ppo.Args().use_kl_loss  # one of the two


def test_adaptive_coefficient_by_hand():
    """(45) .02 with target .1: KL .16 is 60 % above, bounded to 20 %, times 500/10000; KL .09 is 10 % below."""
    assert ppo.next_kl_coef(0.02, 0.16, 500, 0.1, 10000) == pytest.approx(0.0202, rel=1e-12)
    assert ppo.next_kl_coef(0.02, 0.09, 500, 0.1, 10000) == pytest.approx(0.0199, rel=1e-12)


def test_value_loss_by_hand():
    """Old value 1, clipped to 1 +- .5. Return 3, value 2: (1.5 - 3)^2 / 2 is the larger error, without gradient. Return 0, value 2: 2^2 / 2."""
    values = torch.tensor([2.0, 2.0, 1.2], requires_grad=True)
    losses, found = ppo.value_loss(values, torch.tensor([1.0, 1.0, 1.0]), torch.tensor([3.0, 0.0, 1.0]), 0.5)
    close(losses.detach(), [1.125, 2.0, 0.02], atol=1e-7)
    losses.sum().backward()
    close(values.grad, [0.0, 2.0, 0.2], atol=1e-7)
    assert found["vf_clipfrac"].tolist() == [1, 0, 0]


def test_dual_clip_by_hand():
    """Old probability .1, new .5, advantage -1: loss 5, capped at 3 by the dual clip."""
    logp, old = torch.log(torch.tensor([0.5])), torch.log(torch.tensor([0.1]))
    for c, expected in (0, 5), (3.0, 3):
        assert ppo.policy_loss(logp, old, torch.tensor([-1.0]), c=c)[0].item() == pytest.approx(expected)


def test_whitening_little_by_hand(process_group):
    """(38) One value: 0, no exception. 1 and 3: mean 2, sample variance 2."""
    assert ppo.whiten(torch.tensor([0.7])).tolist() == [0] and len(ppo.whiten(torch.zeros(0))) == 0
    close(ppo.whiten(torch.tensor([1.0, 3.0])), [-0.70710678, 0.70710678])
    close(ppo.whiten(torch.tensor([1.0, 3.0]), shift_mean=False), [1.29289322, 2.70710678])


def test_missing_reward_has_no_part(process_group):
    """(14) Of 1, 0, 0: mean 1/3, sample std .57735."""
    z = ppo.normalize_rewards(torch.tensor([1.0, math.nan, 0, 0], dtype=torch.float64))
    assert math.isnan(z[1])
    close(z[[0, 2, 3]], [1.15470054, -0.57735027, -0.57735027], atol=1e-7)
    assert ppo.normalize_rewards(torch.tensor([math.nan])).isnan().all()


def test_running_normalisation_by_hand(process_group):
    """1, 2, 3, then 6 and a missing one, then none at all: by the moments of 1, 2, 3, then of 1, 2, 3, 6 (mean 3, variance 14/3)."""
    running = {"count": 0, "mean": 0.0, "m2": 0.0}
    close(ppo.normalize_rewards(torch.tensor([1.0, 2.0, 3.0]), running), [-1.0, 0.0, 1.0], atol=1e-7)
    second = ppo.normalize_rewards(torch.tensor([6.0, math.nan]), running)
    close(second[0], 3 / math.sqrt(14 / 3))
    assert ppo.normalize_rewards(torch.tensor([math.nan]), running).isnan().all()
    assert running == {"count": 4, "mean": pytest.approx(3), "m2": pytest.approx(14)} and json.loads(json.dumps(running)) == running


def test_multiplier_by_hand():
    """Mean cost 1.5 over a threshold of 1, rate .1, from lambda 2: log 2 + .1 * .5 * 2. And A_R = 3, A_C = 1, lambda 2: (3 - 2) / 3."""
    args = ppo.Args(lambda_lr=0.1, cost_threshold=1.0)
    assert ppo.next_log_lambda(math.log(2), 1.5, args) == pytest.approx(math.log(2) + 0.1)
    assert ppo.next_log_lambda(math.log(2), 0.5, args) == pytest.approx(math.log(2) - 0.1)
    assert ppo.next_log_lambda(math.log(2), 99.0, ppo.Args(lambda_max=5.0)) == pytest.approx(math.log(5))
    assert ppo.mix_advantages(3.0, 1.0, 2.0) == pytest.approx(1 / 3)


def test_row_means_by_hand():
    close(ppo.row_means(torch.tensor([1.0, 3.0, 5.0]), torch.tensor([2, 0, 1])), [2.0, 0.0, 5.0])


@pytest.mark.parametrize("kind, expected", [("constant", [0.5, 1, 1, 1, 1, 1]), ("linear", [0.5, 1, 1, 0.75, 0.5, 0.25]),
                                            ("cosine", [0.5, 1, 1, 0.853553391, 0.5, 0.146446609])])  # (1 + cos(pi k / 4)) / 2
def test_learning_rate(kind, expected):
    """2 steps of warm-up, then 4 steps on the way down to 0 at a seventh step."""
    args = ppo.Args(warmup_steps=2, lr_scheduler_type=kind)
    close([ppo.learning_rate(3.0, step, 6, args) / 3 for step in range(1, 7)], expected)


# ---- 2. helpers that stand in both scripts

@both_copies
@pytest.mark.parametrize("name", ["llama tied", "qwen2 untied", "mistral, window"])
def test_packed_logprobs_equal_row_by_row(process_group, tmp_path, monkeypatch, script, name):
    monkeypatch.setattr(script, "HEAD_CHUNK", 7)  # 26 response tokens: four parts
    path, samples = save_model(tmp_path, CONFIGS[name]), random_samples((5, 3), (1, 9), (7, 0), (12, 1), (3, 13))
    plain = AutoModelForCausalLM.from_pretrained(path, attn_implementation="sdpa")
    packed = script.load_model(path, script.Args(dtype="fp32", compile="false"), CPU)
    logp, entropy = packed.token_logprobs(*script.pack(samples, CPU), 0.7, True)
    expected_logp, expected_entropy = map(torch.cat, zip(*(row_logprobs(plain, s, 0.7) for s in samples)))
    close(logp.detach(), expected_logp.detach(), atol=1e-5)
    close(entropy.detach(), expected_entropy.detach(), atol=1e-5)
    weight = torch.linspace(-1, 2, 26)
    (weight * (logp + 0.3 * entropy)).sum().backward()
    (weight * (expected_logp + 0.3 * expected_entropy)).sum().backward()
    gradients = {n: p.grad.full_tensor() for n, p in packed.named_parameters()}
    for n, p in plain.named_parameters():
        close(gradients[n], p.grad, atol=1e-5 * p.grad.abs().max().item())


@both_copies
def test_reference_logprobs_in_the_order_of_the_samples(process_group, tmp_path, script):
    path, samples = save_model(tmp_path, CONFIGS["llama tied"]), random_samples((5, 3), (1, 9), (12, 1))
    args = script.Args(dtype="fp32", compile="false", max_tokens_per_micro_batch=10, temperature=0.7)
    model, plain = script.load_model(path, args, CPU, train=False), AutoModelForCausalLM.from_pretrained(path)
    close(script.batch_logprobs(model, samples, [0, 3, 12, 13], args, CPU), torch.cat([row_logprobs(plain, s, 0.7)[0] for s in samples]).detach(), atol=1e-5)
    assert not any(p.requires_grad for p in model.parameters())


@both_copies
def test_architecture_with_scaled_logits_is_refused(process_group, tmp_path, script):
    save_model(tmp_path, GraniteConfig(**SIZE, logits_scaling=8.0))
    with pytest.raises(ValueError, match="packed .* of GraniteForCausalLM differ"):
        script.load_model(tmp_path, script.Args(dtype="fp32", compile="false"), CPU)


@both_copies
def test_pack_by_hand(script):
    """Pad 0 and EOS 2 are tokens like others: what was sampled is trained on, up to and with the EOS (pad may equal it)."""
    samples = [Sample([5, 6, 7], [8, 2], "stop", None), Sample([9, 4], [], "length", None), Sample([3], [5, 0, 2], "stop", None)]
    inputs, labels = script.pack(samples, CPU)
    assert inputs["input_ids"].tolist() == [[5, 6, 7, 8, 2, 9, 4, 3, 5, 0, 2]]
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 0, 1, 2, 3]]
    assert inputs["cu_seq_lens_q"].tolist() == [0, 5, 7, 11] and inputs["max_length_q"] == 5
    assert inputs["index"].tolist() == [2, 3, 7, 8, 9] and labels.tolist() == [8, 2, 5, 0, 2]
    assert script.flat_rows([0, 2, 2, 5], [2, 0]).tolist() == [2, 3, 4, 0, 1]


@both_copies
@pytest.mark.parametrize("mode, expected", [("token-mean", [1 / 6] * 3), ("seq-mean-token-sum", [1 / 2] * 3),
                                            ("seq-mean-token-mean", [1 / 8, 1 / 2, 1 / 4]), ("seq-mean-token-sum-norm", [1 / 20] * 3)])
def test_loss_weights_by_hand(script, mode, expected):
    """Responses of 4, 0 (masked out) and 2 tokens, two rows and 6 tokens in all, at most 10 tokens a response."""
    close(script.loss_weights(torch.tensor([4, 0, 2]), mode, 6, 2, 10), expected, atol=1e-7)
    assert script.loss_weights(torch.tensor([0, 0]), mode, 0, 0, 4).isfinite().all()


@both_copies
def test_micro_batches_hold_every_row_once(process_group, script):
    sizes = torch.randint(1, 40, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    samples = random_samples(*[(1, size) for size in sizes])
    for budget in (40, 64, 333, 10**6):
        lists = script.micro_batches(samples, range(20, 60), budget)
        assert sorted(i for rows in lists for i in rows) == list(range(20, 60))
        assert all(0 < sum(sizes[i] + 1 for i in rows) <= budget for rows in lists)


@both_copies
def test_torchrun_passes_the_options_on(script):
    """torchrun stops at an option that begins several of its own ("ambiguous option: --x could match ..."), though it stands behind the script."""
    theirs = get_args_parser()._option_string_actions
    for name in vars(script.Args()).keys() - {"n"} | {"rollout_n"}:  # --n is --rollout_n under torchrun
        assert len({id(action) for option, action in theirs.items() if option.startswith(f"--{name}")}) < 2, name
    assert script.parse_args(script.Args, ["--rollout_n", "3"]).n == script.parse_args(script.Args, ["--n", "3"]).n == 3


@both_copies
@pytest.mark.parametrize("text, value", [("true", True), ("false", False), ("True", True), ("1", True), ("0", False)])
def test_booleans(script, text, value):
    assert script.parse_args(script.Args, ["--use_kl_loss", text]).use_kl_loss is value


@both_copies
def test_help_names_every_option_on_two_screens(script, capsys):
    with pytest.raises(SystemExit):
        script.parse_args(script.Args, ["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert all(any(f"--{name} " in line for line in lines) for name in vars(script.Args()))
    assert len(lines) <= 120


# Sums over ranks: what each of two ranks finds must be what one finds in the whole.
BATCHES = [torch.tensor([0.3, 2.0, -1.0, 0.5, 7.0, 0.25, 0.1], dtype=torch.float64), torch.tensor([4.0, math.nan, 1.0, 1.5, -2.0, 0.0, 3.0], dtype=torch.float64)]


def sums_over_ranks(rank, world):
    """Of alternate values; the third time rank 0 has none."""
    mine = [batch[rank::world] for batch in BATCHES]
    running = {"count": 0, "mean": 0.0, "m2": 0.0}
    some = BATCHES[0] if rank else BATCHES[0][:0]
    return {"whiten": ppo.whiten(mine[0]), "batch": ppo.normalize_rewards(mine[1]), "running": [ppo.normalize_rewards(batch, running) for batch in mine],
            "state": running, "moments": ppo.moments(mine[0]), "stats": ppo.stats("x", mine[0]), "nothing here": ppo.moments(some) if world > 1 else ppo.moments(BATCHES[0]),
            "nothing": ppo.stats("x", BATCHES[0][:0])}


def sums_worker(folder):
    """And sizes (prompt + response) of this rank's samples, and the lists they are split into, by both copies."""
    rank, world, _ = ppo.init_distributed()
    lists = []
    for budget, sizes in [(10, [[6] * 5, [1] * 5]), (10, [[5, 5, 5, 5], [10, 1, 9, 2]]), (7, [[], [3, 4, 7]]), (100, [[3, 4], [7]])]:
        samples = random_samples(*[(1, size - 1) for size in sizes[rank]])
        lists.append([script.micro_batches(samples, range(len(samples)), budget) for script in (grpo, ppo)])
    torch.save((sums_over_ranks(rank, world), lists), folder / f"rank_{rank}.pt")


def test_sums_over_two_ranks(process_group, tmp_path):
    done = fork(sums_worker, tmp_path, tmp_path, ranks=2)
    assert done.codes == [0, 0], done.err
    (a, a_lists), (b, b_lists) = (torch.load(tmp_path / f"rank_{rank}.pt") for rank in (0, 1))
    one = sums_over_ranks(0, 1)
    for key in ("state", "moments", "stats", "nothing here"):
        assert a[key] == pytest.approx(one[key], rel=1e-12) and b[key] == pytest.approx(one[key], rel=1e-12), key
    for key, found in [("whiten", [(a["whiten"], b["whiten"], one["whiten"])]), ("batch", [(a["batch"], b["batch"], one["batch"])]),
                       ("running", zip(a["running"], b["running"], one["running"]))]:
        for even, odd, whole in found:
            torch.testing.assert_close(even, whole[0::2], rtol=1e-12, atol=1e-12, equal_nan=True, msg=key)
            torch.testing.assert_close(odd, whole[1::2], rtol=1e-12, atol=1e-12, equal_nan=True, msg=key)
    assert one["stats"] == {"x/mean": pytest.approx(9.15 / 7), "x/max": 7, "x/min": -1} and a["nothing"] == {"x/mean": 0, "x/max": 0, "x/min": 0}
    for script in (0, 1):
        a_script, b_script = [x[script] for x in a_lists], [x[script] for x in b_lists]
        assert a_script[0] == [[0], [1], [2], [3], [4]] and b_script[0] == [[0, 1, 2, 3, 4], [], [], [], []]   # two of 6 don't fit into 10
        assert a_script[1] == [[0, 1], [2, 3], []] and b_script[1] == [[0], [2], [3, 1]]                        # 5 + 5 fits; 10 | 9 | 2 + 1, the longest first
        assert a_script[2] == [[], []] and b_script[2] == [[2], [1, 0]]
        assert a_script[3] == [[1, 0]] and b_script[3] == [[0]]


# ---- 3. the critic

@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["llama untied", "qwen2 untied", "qwen2, window in one layer", "mistral, window"])
def test_packed_values_equal_row_by_row(process_group, tmp_path, name, checkpointing):
    """A critic that starts from a reward model keeps its head."""
    path, samples = save_value_model(tmp_path, CONFIGS[name]), random_samples((5, 3), (1, 9), (7, 0), (12, 1), (3, 13))
    plain = AutoModelForSequenceClassification.from_pretrained(path, attn_implementation="sdpa")
    critic = ppo.load_model(path, ppo.Args(dtype="fp32", compile="false", gradient_checkpointing=checkpointing), CPU, head="value")
    inputs, _ = ppo.pack(samples, CPU)
    values, expected = critic.token_values(inputs), torch.cat([row_values(plain, s) for s in samples])
    assert values.shape == (26,) and expected.std() > 0.1
    close(values.detach(), expected.detach(), atol=1e-5)
    weight = torch.linspace(-1, 2, 26)
    (weight * values).sum().backward()
    (weight * expected).sum().backward()
    gradients = {n: p.grad.full_tensor() for n, p in critic.named_parameters()}
    assert gradients.keys() == {n for n, _ in plain.named_parameters()}
    for n, p in plain.named_parameters():
        close(gradients[n], p.grad, atol=1e-5 * p.grad.abs().max().item())


def test_values_in_the_order_of_the_samples(process_group, tmp_path):
    """batch_values in several micro-batches, the longest first inside; an engine that answered with nothing leaves nothing."""
    path, samples = save_value_model(tmp_path, CONFIGS["llama untied"]), random_samples((5, 3), (7, 0), (1, 9), (12, 1))
    args = ppo.Args(dtype="fp32", compile="false", max_tokens_per_micro_batch=7)
    critic, plain = ppo.load_model(path, args, CPU, head="value"), AutoModelForSequenceClassification.from_pretrained(path)
    values = ppo.batch_values(critic, samples, [0, 3, 3, 12, 13], args, CPU)
    close(values, torch.cat([row_values(plain, s) for s in samples]).detach(), atol=1e-5)
    assert not values.requires_grad


def test_new_head_is_zero(process_group, tmp_path):
    """(64) V = 0 everywhere, while the gradient of the head is not; the backbone is the language model's."""
    path, samples = save_model(tmp_path, CONFIGS["qwen2 tied"]), random_samples((5, 3), (1, 9))
    critic = ppo.load_model(path, ppo.Args(dtype="fp32", compile="false"), CPU, head="value")
    values = critic.token_values(ppo.pack(samples, CPU)[0])
    assert values.tolist() == [0.0] * 12
    values.sum().backward()
    gradients = {n: p.grad.full_tensor() for n, p in critic.named_parameters()}
    assert gradients["score.weight"].abs().min() > 0 and gradients["model.embed_tokens.weight"].abs().max() == 0
    weights = {n: p.full_tensor() for n, p in critic.named_parameters()}
    for name, parameter in AutoModelForCausalLM.from_pretrained(path).named_parameters():
        assert torch.equal(weights[name], parameter), name


def test_reward_model_in_half_precision_is_close(process_group, tmp_path):
    """A model that only runs forward may do with bf16 weights; the trained ones and an averaged reference may not."""
    path, args = save_value_model(tmp_path, CONFIGS["llama untied"]), ppo.Args(dtype="bf16", compile="false")
    dtypes = [{p.dtype for p in ppo.load_model(path, args, CPU, head="value", **kind).parameters()} for kind in (dict(train=False, fp32=False), dict(train=False), {})]
    assert dtypes == [{torch.bfloat16}, {torch.float32}, {torch.float32}]


# ---- 4. reward models

@pytest.mark.parametrize("name", ["llama untied", "qwen2 untied", "mistral, window"])
def test_scores_equal_transformers_own(process_group, tmp_path, name):
    """Each row alone, in the order of the samples, by micro-batches of two or three. Pad tokens inside a row are tokens."""
    path = save_value_model(tmp_path, CONFIGS[name])
    samples = [Sample(s.prompt_ids, [*s.response_ids[:-1], 7] if s.response_ids else [], "stop", None) for s in random_samples((5, 3), (1, 9), (12, 1), (9, 13), (4, 7))]
    samples += [Sample([5, 0, 6, 0, 7], [], "stop", None), Sample([3, 4], [0, 0, 9], "stop", None)]
    args = ppo.Args(dtype="fp32", compile="false", max_tokens_per_micro_batch=11)
    model = ppo.load_model(path, args, CPU, head="value", train=False, fp32=False)
    plain = AutoModelForSequenceClassification.from_pretrained(path)
    assert plain.config.pad_token_id == 0
    for _ in range(2):  # it waits on the host in between
        scores = ppo.model_scores(model, samples, args, CPU)
        close(scores, [own_score(plain, s.prompt_ids + s.response_ids) for s in samples], atol=1e-5)
    assert scores.dtype == torch.float64 and scores.std() > 0.1


SUMS = [{"prompt": [{"role": "user", "content": "what is 2+7?"}]}, {"prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1?"}]}]


def encoded(tokenizer, sums=SUMS, texts=("#### 9", "#### 2")):
    """Samples as the actor's tokenizer gives them, its EOS after each response."""
    ask = lambda messages: tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    answer = lambda text: tokenizer.encode(text, add_special_tokens=False) + [tokenizer.eos_token_id]
    return [Sample(ask(s["prompt"]), answer(t), "stop", None) for s, t in zip(sums, texts)]


def test_retemplate_writes_the_judges_own_ids():
    """The whole conversation in the judge's template, by its tokenizer, the actor's EOS gone."""
    actor, judge = demo_tokenizer(), other_tokenizer()
    rewritten = ppo.retemplate(encoded(actor), SUMS, actor, judge, 100)
    assert [judge.decode(s.prompt_ids) for s in rewritten] == ["[CLS][USER]what is 2+7?[SEP][BOT]#### 9[SEP]", "[CLS][USER]be brief[SEP][USER]1+1?[SEP][BOT]#### 2[SEP]"]
    for sample, row, text in zip(rewritten, SUMS, ("#### 9", "#### 2"), strict=True):
        own = judge.apply_chat_template([*row["prompt"], {"role": "assistant", "content": text}], return_dict=True)["input_ids"]
        assert sample.prompt_ids == own and sample.response_ids == [] and sample.finish_reason == "stop"
    assert judge.unk_token_id not in rewritten[0].prompt_ids and SUMS[0]["prompt"] == [{"role": "user", "content": "what is 2+7?"}]


def test_retemplate_leaves_equal_ones_alone():
    """What the actor sampled is what is scored: the same ids, its own EOS with them. Another template alone is another."""
    actor, samples = demo_tokenizer(), encoded(demo_tokenizer())
    assert ppo.retemplate(samples, SUMS, actor, demo_tokenizer(), 100) == samples
    judge = demo_tokenizer()
    judge.chat_template = judge.chat_template.replace("{{ bos_token }}", "")
    assert [s.prompt_ids for s in ppo.retemplate(samples, SUMS, actor, judge, 100)] == [(s.prompt_ids + s.response_ids)[1:] for s in samples]
    judge = demo_tokenizer()
    judge.add_tokens(["2+7"])  # and so is another vocabulary
    rewritten = ppo.retemplate(samples, SUMS, actor, judge, 100)
    assert len(actor) in rewritten[0].prompt_ids and rewritten[1].prompt_ids == samples[1].prompt_ids + samples[1].response_ids


def test_retemplate_keeps_the_tail():
    actor, judge = demo_tokenizer(), other_tokenizer()
    whole, cut = (ppo.retemplate(encoded(actor), SUMS, actor, judge, longest) for longest in (100, 12))
    assert [s.prompt_ids for s in cut] == [s.prompt_ids[-12:] for s in whole] and judge.decode(cut[0].prompt_ids) == "+7?[SEP][BOT]#### 9[SEP]"


def test_retemplate_for_a_template_without_a_system_role():
    """As prompts are read for such an actor: the system's text goes before the user's, and the prompts stay as they are."""
    actor, judge = demo_tokenizer(), other_tokenizer()
    judge.chat_template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + judge.chat_template
    rewritten = ppo.retemplate(encoded(actor), SUMS, actor, judge, 100)
    assert rewritten[1].prompt_ids == judge.apply_chat_template([{"role": "user", "content": "be brief\n\n1+1?"}, {"role": "assistant", "content": "#### 2"}], return_dict=True)["input_ids"]
    assert judge.decode(rewritten[0].prompt_ids) == "[CLS][USER]what is 2+7?[SEP][BOT]#### 9[SEP]" and SUMS[1]["prompt"][0] == {"role": "system", "content": "be brief"}


def test_reward_model_needs_a_head(process_group, tmp_path):
    """A language model given as a reward model would get a new head, which is 0, and every score would be 0."""
    save_model(tmp_path, CONFIGS["llama untied"])
    with pytest.raises(ValueError, match="score"):
        ppo.load_model(tmp_path, ppo.Args(dtype="fp32", compile="false"), CPU, head="value", train=False, fp32=False)


def test_model_without_a_plain_head_is_refused(process_group, tmp_path):
    size = {k: v for k, v in SIZE.items() if k != "num_key_value_heads"}
    AutoModelForSequenceClassification.from_config(BertConfig(**size, num_labels=1)).save_pretrained(tmp_path)  # its head is called classifier
    with pytest.raises(ValueError, match="BertForSequenceClassification has no plain linear head"):
        ppo.load_model(tmp_path, ppo.Args(dtype="fp32", compile="false"), CPU, head="value")


# ---- 5. the script: a whole step against plain transformers

def plain_gae(rewards, values, gamma, lam):
    """By the sum of its definition: advantages, returns of one response."""
    deltas = [r + gamma * after - v for r, v, after in zip(rewards, values, [*values[1:], 0.0])]
    advantages = [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]
    return advantages, [a + v for a, v in zip(advantages, values)]


KINDS = {"kl": lambda d: d, "abs": abs, "mse": lambda d: d**2 / 2, "low_var_kl": lambda d: ((-d).exp() - 1 + d).clamp(max=10)}  # the clamp as in verl


def plain_ppo_step(actor, critics, ref, samples, o, minis, multiplier=0.0, critic_epochs=2):
    """One step of PPO in place on (model, optimizer) pairs -> what metrics.jsonl should say.

    critics: {"critic": (pair, scores)}, perhaps with a "cost_critic" and costs; NaN scores are missing. multiplier: lambda of the costs.
    """
    present = [i for i in range(len(samples)) if not any(math.isnan(scores[i]) for _, scores in critics.values())]
    mean = lambda values: statistics.mean(values)
    with torch.no_grad():
        old = [row_logprobs(actor[0], s, o.temperature)[0].double() for s in samples]
        base = [row_logprobs(ref, s, o.temperature)[0].double() for s in samples]
        before = {name: [row_values(pair[0], s).double() for s in samples] for name, (pair, _) in critics.items()}
    kl = [KINDS[o.kl_penalty](a - b) for a, b in zip(old, base)]
    found, advantages, returns = {"actor/reward_kl_penalty": mean([kl[i].mean().item() for i in present])}, {i: 0.0 for i in present}, defaultdict(dict)
    for name, (_, scores) in critics.items():
        for i in present:
            rewards = (o.kl_coef * kl[i] * (1 if name == "cost_critic" else -1)).tolist()  # a cost grows with the KL
            rewards[-1] += scores[i]
            mine, returns[name][i] = plain_gae(rewards, before[name][i].tolist(), o.gamma, o.lam)
            share = {"critic": 1, "cost_critic": -multiplier}[name] / (1 + multiplier)
            advantages[i] = advantages[i] + share * torch.tensor(mine, dtype=torch.float64)
    everyone = torch.cat([*advantages.values()])
    advantages = {i: (a - everyone.mean()) / (everyone.var() + 1e-8).sqrt() for i, a in advantages.items()}
    targets, guesses = [x for i in present for x in returns["critic"][i]], [x for i in present for x in before["critic"][i].tolist()]
    found |= {"critic/advantages/max": max(a.max().item() for a in advantages.values()), "critic/advantages/min": min(a.min().item() for a in advantages.values()),
              "critic/returns/mean": mean(targets), "critic/values/mean": mean(guesses),
              "critic/rewards/mean": mean([critics["critic"][1][i] - o.kl_coef * kl[i].sum().item() for i in present]),
              "critic/vf_explained_var": 1 - statistics.variance(a - b for a, b in zip(targets, guesses)) / (statistics.variance(targets) + 1e-5)}

    def value_loss(name, i):
        v, then, target = row_values(critics[name][0][0], samples[i]), before[name][i].float(), torch.tensor(returns[name][i]).float()
        clipped = then + (v - then).clamp(-o.cliprange_value, o.cliprange_value)
        loss, other = (v - target) ** 2 / 2, (clipped - target) ** 2 / 2
        return torch.max(loss, other), {"vf_loss": torch.max(loss, other)}, {"vf_clipfrac": other > loss, "vpred_mean": v}

    def actor_loss(_, i):
        logp, entropy = row_logprobs(actor[0], samples[i], o.temperature)
        a, ratio = advantages[i].float(), (logp - old[i].float()).exp()
        plain, clipped = -a * ratio, -a * ratio.clamp(1 - o.clip_ratio_low, 1 + o.clip_ratio_high)
        loss = torch.max(plain, clipped)
        capped = (a < 0) & (loss > -o.clip_ratio_c * a)
        loss = torch.where(capped, -o.clip_ratio_c * a, loss)
        k3 = KINDS["low_var_kl"](logp - base[i].float())
        return (loss - o.entropy_coeff * entropy + o.kl_loss_coef * k3, {"pg_loss": loss, "kl_loss": k3},
                {"entropy": entropy, "pg_clipfrac": clipped > plain, "pg_clipfrac_lower": capped, "ppo_kl": old[i].float() - logp})

    for name, (model, optimizer), token_losses in *((name, pair, value_loss) for name, (pair, _) in critics.items()), ("actor", actor, actor_loss):
        means = defaultdict(list)
        for mini in minis * (2 if name == "actor" else critic_epochs):
            rows = [i for i in mini if i in present]
            count, here = sum(len(old[i]) for i in rows), defaultdict(float)
            for i in rows:
                n = len(old[i])
                weight = {"token-mean": 1 / count, "seq-mean-token-sum": 1 / len(rows), "seq-mean-token-mean": 1 / (len(rows) * n),
                          "seq-mean-token-sum-norm": 1 / (len(rows) * 4)}[o.loss_agg_mode]  # 4: --max_response_length
                loss, terms, shares = token_losses(name, i)
                (weight * loss.sum()).backward()
                for key, value in terms.items():
                    here[key] += weight * value.sum().item()
                for key, value in shares.items():
                    here[key] += value.float().sum().item() / count
            here["grad_norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), o.max_grad_norm).item()
            optimizer.step()
            optimizer.zero_grad()
            for key, value in here.items():
                means[key].append(value)
        found |= {f"{name}/{key}": statistics.mean(values) for key, values in means.items()}
    return found


def restored(model, path, lr):
    """A plain model and its AdamW as a checkpoint of the script holds them."""
    saved = stored(path)
    model.load_state_dict({name: saved[f"model.{name}"] for name in model.state_dict()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    for name, parameter in model.named_parameters():
        optimizer.state[parameter] = {key: saved[f"optimizer.state.{name}.{key}"] for key in ("step", "exp_avg", "exp_avg_sq")}
    return model, optimizer


# Budget 36: every sample alone, the one without a reward too. 60: two or three together. 4096: all.
@pytest.mark.parametrize("mode, budget, kind, safe, epochs", [("token-mean", 36, "kl", False, 0), ("token-mean", 4096, "kl", True, 0), ("seq-mean-token-mean", 60, "mse", False, 3),
                                                              ("seq-mean-token-sum", 36, "abs", False, 1), ("seq-mean-token-sum-norm", 4096, "low_var_kl", False, 0)])
def test_a_step_equals_plain_ppo(process_group, demo, reward_file, tmp_path, mode, budget, kind, safe, epochs):
    """The second step: there the policy has left the reference, and values are not 0. Two epochs of two mini-batches, so that ratios and values
    are clipped; missing rewards (14, 35), a penalty for missing EOS (29), KL in the reward and in the loss, whitening, gradients
    clipped; once with costs, twice with other epochs of the critic."""
    o = SimpleNamespace(kl_penalty=kind, temperature=1.7, gamma=0.95, lam=0.9, kl_coef=0.2, cliprange_value=0.05, clip_ratio_low=0.02, clip_ratio_high=0.03, clip_ratio_c=1.01,
                        entropy_coeff=0.02, kl_loss_coef=0.3, loss_agg_mode=mode, max_grad_norm=0.5)
    done = run(demo, tmp_path, **vars(o), max_tokens_per_micro_batch=budget, ppo_mini_batch_size=2, ppo_epochs=2, critic_ppo_epochs=epochs, use_kl_loss="true", missing_eos_penalty=0.75, critic_lr=5e-3,
               reward_fn=f"{reward_file}:reward", cost_fn=f"{reward_file}:cost" if safe else "", total_training_steps=2, save_freq=1)
    records, rows = dumped(tmp_path, 2), rows_of_step(demo, 2)
    samples = [Sample(row["prompt_ids"], r["response_ids"], r["finish_reason"], None) for row, r in zip(rows, records, strict=True)]
    judgements = {"critic": [judged(reward, r["response"]) - 0.75 * (r["finish_reason"] == "length") for r in records]}
    judgements |= {"cost_critic": [judged(cost, r["response"]) for r in records]} if safe else {}
    scores = [math.nan if any(map(math.isnan, x)) else x[0] for x in zip(*judgements.values())]
    assert 0 < sum(map(math.isnan, scores)) < 5 and {r["finish_reason"] for r in records} == {"stop", "length"}
    assert [r["score"] for r in records] == pytest.approx(scores, nan_ok=True)

    row, before, after = done.rows[1], *(done.path / f"global_step_{step}" for step in (1, 2))
    load = lambda: AutoModelForSequenceClassification.from_pretrained(demo / "model", num_labels=1)
    actor, critics = restored(AutoModelForCausalLM.from_pretrained(demo / "model"), before / "actor", 1e-3), {k: (restored(load(), before / k, 5e-3), x) for k, x in judgements.items()}
    expected = plain_ppo_step(actor, critics, AutoModelForCausalLM.from_pretrained(demo / "model"), samples, o, [range(4), range(4, 8)], row.get("safe/lambda", 0.0), epochs or 2)
    assert min(row["critic/vf_clipfrac"], row["actor/pg_clipfrac"], row["actor/pg_clipfrac_lower"], abs(row["actor/reward_kl_penalty"])) > 0
    assert min(row["critic/grad_norm"], row["actor/grad_norm"]) > 0.5  # clipped
    for key, value in expected.items():
        assert row[key] == pytest.approx(value, rel=1e-3, abs=2e-5), key
    for name, lr, (model, optimizer) in ("actor", 1e-3, actor), *((k, 5e-3, pair) for k, (pair, _) in critics.items()):
        saved, moments = stored(after / name), {n: optimizer.state[p]["exp_avg"] for n, p in model.named_parameters()}
        largest = max(m.abs().max().item() for m in moments.values())
        for n, p in model.named_parameters():
            close(saved[f"optimizer.state.{n}.exp_avg"], moments[n], rtol=0, atol=1e-3 * largest)
            assert (saved[f"model.{n}"] - p).abs().mean() < 1e-3 * lr, n


# ---- two ranks equal one; a resumed run equals the uninterrupted one

START = dict(kl_coef=0.1, lambda_init=0.5)


@pytest.fixture(scope="module")
def everything(demo, reward_file, tmp_path_factory):
    """Options of a run with all there is. 9 training rows, 2 steps of 4 an epoch; the first prompt of steps 1 and 2 is so long that no two of its
    answers share a micro-batch: of two ranks the one that has it runs more of them."""
    folder = tmp_path_factory.mktemp("everything")
    train, test = pq.read_table(demo / "train.parquet"), pq.read_table(demo / "test.parquet")
    rows = train.take(list(range(0, 180, 20))).to_pylist()
    for step in range(2):
        message = rows[batch_rows(9, 4, 0, step)[0]]["prompt"][0]
        message["content"] = " ".join([message["content"]] * 5)
    pq.write_table(pa.Table.from_pylist(rows, schema=train.schema), folder / "train.parquet")
    pq.write_table(test.take(list(range(5))), folder / "test.parquet")
    return dict(train_files=folder / "train.parquet", val_files=folder / "test.parquet", ppo_mini_batch_size=2, max_prompt_length=90, max_tokens_per_micro_batch=100,
                kl_ctrl="adaptive", kl_target=0.001, kl_horizon=20, use_kl_loss="true", kl_loss_coef=0.05, ref_ema_steps=1, ref_ema_alpha=0.6,
                reward_fn=f"{reward_file}:reward", reward_normalize="running", reward_clip=1.2, missing_eos_penalty=0.25,
                cost_fn=f"{reward_file}:cost", cost_threshold=-0.25, lambda_lr=0.3, lambda_update_delay_steps=1, episode_cost_window_size=10,
                critic_warmup=1, gamma=0.99, lam=0.95, entropy_coeff=0.01, rollout_logprobs=1, total_training_steps=4, save_freq=2, test_freq=2, **START)


@pytest.fixture(scope="module")
def one_rank(demo, everything, tmp_path_factory):
    """4 steps of two updates each, with a checkpoint every two steps."""
    folder = tmp_path_factory.mktemp("one_rank")
    run(demo, folder, **everything)
    return folder


@pytest.fixture(scope="module")
def two_ranks(demo, everything, tmp_path_factory):
    """The first 3 of these steps on two ranks, by torchrun."""
    folder = tmp_path_factory.mktemp("two_ranks")
    run_script(*TORCHRUN, "--", SCRIPT, *(x.replace("--n", "--rollout_n") if x == "--n" else x for x in options(demo, folder, **everything | {"total_training_steps": 3})))
    return folder


def test_two_ranks_equal_one(one_rank, two_ranks):
    ones, twos = metrics(one_rank)[:3], metrics(two_ranks)
    losses = ["vf_loss", "vf_clipfrac", "vpred_mean", "grad_norm"]
    keys = [f"critic/{k}" for k in losses] + [f"cost_critic/{k}" for k in losses]
    keys += ["critic/vf_explained_var", *(f"critic/{x}/{k}" for x in ("score", "rewards", "advantages", "returns", "values") for k in ("mean", "max", "min"))]
    keys += ["actor/reward_kl_penalty", "actor/reward_kl_penalty_coeff", "safe/lambda", "safe/cost_window_mean", "safe/cost/mean", "safe/cost/max", "safe/cost/min"]
    keys += ["response_length/mean", "prompt_length/max", "rollout/stop_frac", "reward/error_frac", "response_length/clip_ratio", "perf/total_num_tokens"]
    for one, two in zip(ones, twos, strict=True):
        actor = [f"actor/{k}" for k in ("pg_loss", "pg_clipfrac", "ppo_kl", "entropy", "kl_loss", "grad_norm")] if one["step"] > 1 else []
        for key in keys + actor:
            assert two[key] == pytest.approx(one[key], rel=1e-4, abs=1e-5), (one["step"], key)
        assert min(one["critic/grad_norm"], one["cost_critic/grad_norm"]) > 0.05 and one["rollout/probs_diff_max"] < 1e-5 and two["rollout/probs_diff_max"] < 1e-5
    assert {k: v for k, v in twos[1].items() if k.startswith("val/")} == {k: v for k, v in ones[1].items() if k.startswith("val/")} and "val/demo/arithmetic/acc" in ones[1]


def test_two_ranks_resume_on_one(demo, everything, one_rank, two_ranks, tmp_path):
    row, = run(demo, tmp_path, **everything | {"total_training_steps": 3, "resume_mode": two_ranks / "runs/run/global_step_2"}).rows
    expected = metrics(one_rank)[2]
    for key in ("actor/pg_loss", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm", "cost_critic/vf_loss", "actor/reward_kl_penalty", "actor/reward_kl_penalty_coeff",
                "safe/lambda", "critic/rewards/mean", "critic/values/mean"):
        assert row[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-5), key
    assert row["step"] == 3


def test_resumed_run_takes_a_fixed_coefficient_from_the_command_line(demo, everything, one_rank, tmp_path):
    """As it does learning rates; what an adaptive controller arrived at is its state (45)."""
    row, = run(demo, tmp_path, **everything | {"total_training_steps": 3, "resume_mode": one_rank / "runs/run/global_step_2", "kl_ctrl": "fixed", "kl_coef": 0.3,
                                               "critic_lr": 2e-3}).rows
    assert row["actor/reward_kl_penalty_coeff"] == 0.3 and row["critic/lr"] == row["cost_critic/lr"] == 2e-3


def test_resumed_run_equals_the_uninterrupted_one(process_group, demo, everything, one_rank, tmp_path):
    """Stopped after step 2, the end of an epoch. Weights, moments, reference, coefficient (45), multiplier, window and statistics come back."""
    run(demo, tmp_path, **everything | {"total_training_steps": 2})
    resumed = run(demo, tmp_path, **everything)
    assert "global_step_2" in resumed.out and [r["step"] for r in resumed.rows] == [1, 2, 3, 4]
    for a, b in zip(metrics(one_rank), resumed.rows, strict=True):
        assert without_clock(a) == without_clock(b)
    for name in ("actor", "critic", "cost_critic", "ref"):
        a, b = (stored(folder / f"runs/run/global_step_4/{name}") for folder in (one_rank, tmp_path))
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a), name
    a, b = (json.loads((folder / "runs/run/global_step_4/state.json").read_text()) for folder in (one_rank, tmp_path))
    assert {k: v for k, v in a.items() if k not in ("files", "crc32")} == {k: v for k, v in b.items() if k not in ("files", "crc32")}
    for state in (a, json.loads((tmp_path / "runs/run/global_step_2/state.json").read_text())):  # there was something to bring back
        assert abs(state["kl_coef"] - START["kl_coef"]) > 1e-3 and abs(state["log_lambda"] - math.log(START["lambda_init"])) > 1e-3
        assert len(state["costs"]) == 10 and state["rewards"]["count"] > 4 * state["step"] and state["rewards"]["m2"] > 1


def test_reference_follows_by_its_share(process_group, demo, one_rank):
    """(57) Step 1 trains the critic alone, so the reference stays; then .4 of itself and .6 of the actor. It is in the checkpoint."""
    initial = {f"model.{k}": v for k, v in AutoModelForCausalLM.from_pretrained(demo / "model").state_dict().items()}
    actor, ref = (stored(one_rank / f"runs/run/global_step_2/{name}") for name in ("actor", "ref"))
    assert any((actor[k] - initial[k]).abs().max() > 1e-3 for k in initial)
    for name, value in initial.items():
        close(ref[name], 0.4 * value + 0.6 * actor[name], rtol=0, atol=1e-6)


def test_reference_moves_whole(process_group, tmp_path):
    """(57) All of it, from .5 towards 1 by .6: .8. Both models ran forward without gradient before, which leaves part of FSDP2's parameters gathered."""
    path, samples = save_model(tmp_path, CONFIGS["llama tied"]), random_samples((5, 3), (1, 9))
    args = ppo.Args(dtype="fp32", compile="false")
    ref, actor = (ppo.load_model(path, args, CPU, train=train) for train in (False, True))
    for model, value in (ref, 0.5), (actor, 1.0):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        ppo.batch_logprobs(model, samples, [0, 3, 12], args, CPU)
    ppo.ema_update(ref, actor, 0.6)
    logp = ppo.batch_logprobs(ref, samples, [0, 3, 12], args, CPU)  # what it computes with, not only what it shows
    ref.reshard()
    for name, parameter in ref.named_parameters():
        close(parameter.full_tensor(), torch.full(parameter.shape, 0.8), atol=1e-6)
    plain = AutoModelForCausalLM.from_pretrained(path)
    for parameter in plain.parameters():
        parameter.data.fill_(0.8)
    close(logp, torch.cat([row_logprobs(plain, s, 1.0)[0] for s in samples]).detach(), atol=1e-4)


def test_state_by_its_own_rules(demo, everything, one_rank):
    """Of all four steps, from the responses that were written down: running z-scores, clipped, less the penalty; window and multiplier; KL coefficient."""
    seen, costs, lam, coef, without_cost = [], [], START["lambda_init"], START["kl_coef"], 0
    for step, row in enumerate(metrics(one_rank), 1):
        records = dumped(one_rank, step)
        raw = [judged(reward, r["response"]) for r in records]
        prices = [judged(cost, r["response"]) for r in records]
        assert len(records) == 8 and row["critic/score/mean"] == pytest.approx(statistics.mean(x for x in raw if not math.isnan(x)))
        seen += [x for x in raw if not math.isnan(x)]
        mean, std = statistics.mean(seen), statistics.stdev(seen)
        expected = [math.nan if math.isnan(price) else max(-1.2, min(1.2, (x - mean) / std)) - 0.25 * (r["finish_reason"] == "length") if not math.isnan(x) else math.nan
                    for x, price, r in zip(raw, prices, records)]
        assert [r["score"] for r in records] == pytest.approx(expected, rel=1e-6, nan_ok=True)
        costs = (costs + [x for x in prices if not math.isnan(x)])[-10:]
        without_cost += sum(math.isnan(price) and not math.isnan(x) for x, price in zip(raw, prices))
        if step > 1:  # --lambda_update_delay_steps
            lam *= math.exp(0.3 * (statistics.mean(costs) + 0.25) * lam)
        assert (row["safe/cost_window_mean"], row["safe/lambda"]) == pytest.approx((statistics.mean(costs), lam))
        assert row["actor/reward_kl_penalty_coeff"] == pytest.approx(coef)
        coef *= 1 + min(max(row["actor/reward_kl_penalty"] / 0.001 - 1, -0.2), 0.2) * 8 / 20
        state = one_rank / f"runs/run/global_step_{step}/state.json"
        if state.exists():
            state = json.loads(state.read_text())
            assert state["kl_coef"] == pytest.approx(coef) and state["costs"] == pytest.approx(costs) and math.exp(state["log_lambda"]) == pytest.approx(lam)
            assert state["rewards"] == {"count": len(seen), "mean": pytest.approx(mean), "m2": pytest.approx(std**2 * (len(seen) - 1))}
    assert max(costs) > -0.25 > min(costs) and without_cost


# ---- single features

def test_critic_warmup_leaves_the_actor_alone(process_group, demo, reward_model, tmp_path):
    """Bit by bit, while the critic, which starts from a reward model and its head, moves."""
    done = run(demo, tmp_path, critic_warmup=2, critic_path=reward_model, kl_coef=0, total_training_steps=2, save_freq=1)
    before = AutoModelForCausalLM.from_pretrained(demo / "model").state_dict()
    plain = AutoModelForSequenceClassification.from_pretrained(reward_model)
    for step in (1, 2):
        actor = stored(done.path / f"global_step_{step}/actor")
        assert all(torch.equal(actor[f"model.{name}"], value) for name, value in before.items())
    assert not any(key.startswith("actor/pg") for row in done.rows for key in row) and "timing/update_actor" not in done.rows[1]
    samples = [Sample(row["prompt_ids"], r["response_ids"], "stop", None) for row, r in zip(rows_of_step(demo, 1), dumped(tmp_path, 1), strict=True)]
    assert done.rows[0]["critic/values/mean"] == pytest.approx(torch.cat([row_values(plain, s) for s in samples]).mean().item(), rel=1e-4)
    critic = stored(done.path / "global_step_2/critic")
    for name, value in plain.state_dict().items():
        assert (critic[f"model.{name}"] - value).abs().max() > 1e-3, name
    merge(done.path / "global_step_2/critic", tmp_path / "merged", dtype="fp32")  # a critic is a reward model for the next run
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").state_dict()
    assert all(torch.equal(merged[name], critic[f"model.{name}"]) for name in plain.state_dict())


def test_first_value_loss_is_half_the_squared_returns(demo, reward_file, tmp_path):
    """(64) V = 0 and no KL yet: every token's return is its response's score, and the first update's loss their mean square over two."""
    row, = run(demo, tmp_path, reward_fn=f"{reward_file}:reward", total_training_steps=1).rows
    scores = [(r["score"], len(r["response_ids"])) for r in dumped(tmp_path, 1) if not math.isnan(r["score"])]
    assert row["critic/vf_loss"] == pytest.approx(sum(s**2 / 2 * n for s, n in scores) / sum(n for _, n in scores), rel=1e-5)
    assert row["critic/values/max"] == row["critic/values/min"] == 0 == row["actor/reward_kl_penalty"] and row["critic/score/max"] > 0


def test_reward_model_alone(demo, reward_model, other_reward_model, tmp_path):
    """Scores of the very tokens that were sampled; costs by another model. Validation has its mean, and no accuracy. No ground truth is needed."""
    for name in ("train", "test"):
        pq.write_table(pq.read_table(demo / f"{name}.parquet").slice(0, 12).drop_columns(["reward_model"]), tmp_path / f"{name}.parquet")
    pq.write_table(pq.read_table(demo / "train.parquet").slice(0, 12), tmp_path / "with_truth.parquet")
    row, = run(demo, tmp_path, train_files=tmp_path / "train.parquet", val_files=tmp_path / "test.parquet", test_freq=1, reward_fn="none", reward_model=reward_model,
               cost_model=other_reward_model, total_training_steps=1, max_tokens_per_micro_batch=36).rows
    model, cost_model = (AutoModelForSequenceClassification.from_pretrained(path) for path in (reward_model, other_reward_model))
    rows, records = rows_of_step(demo, 1, tmp_path / "with_truth.parquet"), dumped(tmp_path, 1)
    assert demo_tokenizer().pad_token_id not in {r["response_ids"][-1] for r in records}  # transformers would step over it
    scores = [own_score(model, x["prompt_ids"] + r["response_ids"]) for x, r in zip(rows, records, strict=True)]
    costs = [own_score(cost_model, conversation(other_tokenizer(), x, r)) for x, r in zip(rows, records)]
    assert [r["score"] for r in records] == pytest.approx(scores, abs=1e-5)
    for key, expected in ("critic/score", scores), ("reward/model", scores), ("safe/cost", costs):
        assert [row[f"{key}/{k}"] for k in ("mean", "max", "min")] == pytest.approx([statistics.mean(expected), max(expected), min(expected)], abs=1e-5), key
    assert abs(row["val/demo/arithmetic/reward_model"]) > 1e-3 and not any("acc" in key or key.startswith("reward/no_answer") for key in row)


def test_reward_model_of_another_family_added_to_the_rule(demo, reward_file, other_reward_model, tmp_path):
    """Rule + .5 model; a response that the rule has no score for stays without one. Cut to the judge's 64 positions, which none exceeds."""
    row, = run(demo, tmp_path, reward_fn=f"{reward_file}:reward", reward_model=other_reward_model, reward_model_weight=0.5, total_training_steps=1).rows
    plain, judge = AutoModelForSequenceClassification.from_pretrained(other_reward_model), other_tokenizer()
    records, model_scores, expected = dumped(tmp_path, 1), [], []
    for x, r in zip(rows_of_step(demo, 1), records, strict=True):
        model_scores.append(own_score(plain, conversation(judge, x, r)))
        expected.append(judged(reward, r["response"]) + 0.5 * model_scores[-1])
    assert [r["score"] for r in records] == pytest.approx(expected, abs=1e-5, nan_ok=True) and 0 < sum(map(math.isnan, expected)) < 8
    assert row["reward/model/mean"] == pytest.approx(statistics.mean(model_scores), abs=1e-5) and statistics.stdev(model_scores) > 0.05
    assert row["critic/score/mean"] == pytest.approx(statistics.mean(x for x in expected if not math.isnan(x)), abs=1e-5)


def test_rewards_normalised_by_the_batch(demo, reward_file, tmp_path):
    """Each by its own, then clipped to +-.8; the score that is shown is the raw one."""
    rows, largest = run(demo, tmp_path, reward_fn=f"{reward_file}:reward", reward_normalize="batch", reward_clip=0.8, total_training_steps=2).rows, []
    for step, row in enumerate(rows, 1):
        records = dumped(tmp_path, step)
        raw = [judged(reward, r["response"]) for r in records]
        there = [x for x in raw if not math.isnan(x)]
        z = [(x - statistics.mean(there)) / statistics.stdev(there) for x in raw]
        assert [r["score"] for r in records] == pytest.approx([x if math.isnan(x) else max(-0.8, min(0.8, x)) for x in z], rel=1e-6, nan_ok=True)
        assert row["critic/score/mean"] == pytest.approx(statistics.mean(there))
        largest.append(max(x for x in z if not math.isnan(x)))
    assert max(largest) > 0.8


def test_no_reference_without_kl(demo, tmp_path):
    row, = run(demo, tmp_path, use_kl_in_reward="false", total_training_steps=1).rows
    assert "timing/ref" not in row and not any("kl_penalty" in key for key in row)


def test_whitening_can_be_off(demo, reward_file, tmp_path):
    """With V = 0, gamma = lam = 1 and no KL yet every token's advantage is its response's score."""
    row, = run(demo, tmp_path, whiten_advantages="false", reward_fn=f"{reward_file}:reward", total_training_steps=1).rows
    scores = [r["score"] for r in dumped(tmp_path, 1) if not math.isnan(r["score"])]
    assert (row["critic/advantages/max"], row["critic/advantages/min"]) == (max(scores), min(scores))


def test_options_that_save_memory_change_nothing(demo, tmp_path):
    rows = []
    for value in ("false", "true"):
        saving = dict.fromkeys(("gradient_checkpointing", "param_offload", "optimizer_offload"), value)
        rows.append([without_clock(r) for r in run(demo, tmp_path / value, ppo_mini_batch_size=2, total_training_steps=2, **saving).rows])
    assert rows[0] == rows[1]


def test_a_batch_without_any_reward_is_skipped(process_group, demo, reward_file, tmp_path):
    done = run(demo, tmp_path, reward_fn=f"{reward_file}:broken", reward_normalize="running", cost_fn=f"{reward_file}:cost", total_training_steps=1, save_freq=1)
    row, = done.rows
    assert row["actor/skipped_updates"] == row["critic/skipped_updates"] == row["cost_critic/skipped_updates"] == 1 and row["critic/score/mean"] == 0
    assert not any(isinstance(v, float) and not math.isfinite(v) for v in row.values())
    weights, before = stored(done.path / "global_step_1/actor"), AutoModelForCausalLM.from_pretrained(demo / "model").state_dict()
    assert all(torch.equal(weights[f"model.{name}"], value) for name, value in before.items())
    assert stored(done.path / "global_step_1/critic")["model.score.weight"].abs().max() == 0
    assert json.loads((done.path / "global_step_1/state.json").read_text())["rewards"] == {"count": 0, "mean": 0, "m2": 0}


def test_run_that_skips_again_and_again_ends(demo, reward_file, tmp_path):
    done = fork(become_script, tmp_path, options(demo, tmp_path, reward_fn=f"{reward_file}:broken", max_skipped_steps=2, total_training_steps=5))
    assert done.codes == [1] and [row["step"] for row in metrics(tmp_path)] == [1, 2]
    assert "ppo.py: 2 steps in a row had updates that were skipped" in done.err[0].strip().splitlines()[-1]


def test_masked_nan_has_no_gradient(process_group):
    """(35) A response that is left out may hold what is no number: losses and gradient are those of the others."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    samples, x = [Sample([1], [2, 3], "stop", None), Sample([1], [4], "stop", None)], torch.tensor([1.0, 2.0, 3.0])
    optimizer, seen = torch.optim.SGD(model.parameters(), lr=0.0), []
    optimizer.register_step_pre_hook(lambda *_: seen.append(model.weight.grad.item()))

    def token_losses(inputs, labels, flat):
        losses = model(x[flat, None])[:, 0] + torch.where(flat < 2, math.nan, 0.0)
        return losses, {"vf_loss": losses, "vpred_mean": losses}
    args = ppo.Args(train_batch_size=2, ppo_mini_batch_size=2, max_grad_norm=1e9)
    found = ppo.optimize(model, optimizer, 0.0, 1, token_losses, (samples, [0, 2, 3], torch.tensor([0, 1])), args, CPU)
    assert found["skipped_updates"] == 0 and seen == [3.0] and found["vf_loss"] == found["vpred_mean"] == 3.0


# ---- 6. it learns

@pytest.fixture(scope="module")
def few_sums(demo, tmp_path_factory):
    path = tmp_path_factory.mktemp("few_sums") / "train.parquet"
    pq.write_table(pq.read_table(demo / "train.parquet").take(list(range(0, 352, 11))), path)
    return path


def test_training_raises_the_reward(demo, few_sums, tmp_path):
    """32 sums x 4 answers, 7 steps of four updates: .23 -> .41 with seed 0; .23 -> .46 and .25 -> .46 with seeds 1, 2. With the advantages' sign turned: .20 -> .04."""
    rows = run(demo, tmp_path, train_files=few_sums, train_batch_size=32, n=4, ppo_mini_batch_size=16, ppo_epochs=2, max_response_length=10, temperature=1.0,
               lr=3e-4, critic_lr=1e-3, total_training_steps=7).rows
    scores = [r["critic/score/mean"] for r in rows]
    assert statistics.mean(scores[-2:]) > statistics.mean(scores[:2]) + 0.08, scores
    assert all(r["rollout/probs_diff_max"] < 1e-4 for r in rows)  # the engine kept up with the trainer


def test_the_critic_explains_the_reward(demo, few_sums, reward_file, tmp_path):
    """1 for answers of more than 6 characters, and an actor that stays: of the returns' variance .33 is explained in one of the last steps with seed 0; .56, .20 with 1, 2."""
    rows = run(demo, tmp_path, train_files=few_sums, train_batch_size=16, n=4, ppo_mini_batch_size=8, ppo_epochs=4, max_response_length=8, critic_lr=2e-3, reward_fn=f"{reward_file}:long",
               critic_warmup=6, total_training_steps=6).rows
    assert max(r["critic/vf_explained_var"] for r in rows[-3:]) > 0.15, [r["critic/vf_explained_var"] for r in rows]


# ---- 7. bad input

@pytest.mark.parametrize("world, changed, words", [
    (1, dict(train_batch_size=10, ppo_mini_batch_size=4), ["--train_batch_size 10", "--ppo_mini_batch_size 4"]),
    (4, dict(train_batch_size=20, ppo_mini_batch_size=10), ["--ppo_mini_batch_size 10", "4 GPUs", "multiple of 4"]),
    (4, dict(tensor_model_parallel_size=3), ["--tensor_model_parallel_size 3", "4 GPUs"]),
    (1, dict(tensor_model_parallel_size=0), ["--tensor_model_parallel_size 0"]),
    (1, dict(max_tokens_per_micro_batch=700), ["--max_tokens_per_micro_batch 700", "768", "raise it"]),   # 512 + 256
    (1, dict(n=0), ["--n 0"]), (1, dict(train_batch_size=0), ["--train_batch_size 0"]), (1, dict(ppo_epochs=0), ["--ppo_epochs 0"]),
    (1, dict(gamma=1.1), ["--gamma 1.1", "at most 1"]), (1, dict(lam=-0.1), ["--lam -0.1", "at most 1"]),
    (1, dict(cliprange_value=0.0), ["--cliprange_value 0.0", "above 0"]),
    (1, dict(kl_coef=-0.1), ["--kl_coef -0.1", "at least 0"]), (1, dict(kl_target=0.0), ["--kl_target 0.0", "above 0"]), (1, dict(kl_horizon=0), ["--kl_horizon 0"]),
    (1, dict(reward_clip=-1.0), ["--reward_clip -1.0"]), (1, dict(critic_warmup=-1), ["--critic_warmup -1"]),
    (1, dict(reward_fn="none"), ["--reward_fn none", "--reward_model"]),
    (1, dict(cost_fn="a.py:f", cost_model="b"), ["--cost_fn", "--cost_model", "one"]),
    (1, dict(lambda_init=0.0), ["--lambda_init 0.0", "above 0"]), (1, dict(lambda_init=3.0, lambda_max=2.0), ["--lambda_max 2.0", "--lambda_init 3.0", "raise it"]),
    (1, dict(episode_cost_window_size=0), ["--episode_cost_window_size 0"]),
    (1, dict(kl_ctrl="adaptive", kl_horizon=51, n=1), ["--kl_horizon 51", "256 responses", "raise it"]), (1, dict(critic_ppo_epochs=-1), ["--critic_ppo_epochs -1"]), (1, dict(ref_ema_alpha=1.5), ["--ref_ema_alpha 1.5", "at most 1"]),
    (1, dict(temperature=0.0), ["--temperature 0.0", "above 0"]),
    (1, dict(top_p=0.0), ["--top_p 0.0"]), (1, dict(top_k=0), ["--top_k 0", "-1"]),
    (1, dict(clip_ratio_c=1.0), ["--clip_ratio_c 1.0", "above 1"]),
    (1, dict(logger="console,wandbb"), ["--logger console,wandbb", "unknown wandbb", "tensorboard"])])
def test_check_names_option_value_and_remedy(world, changed, words):
    with pytest.raises(ValueError) as error:
        ppo.check(ppo.Args(**changed), world)
    assert all(word in str(error.value) for word in words), error.value


def test_check_adapts_and_warns(capsys):
    """(43) A coefficient that is given while what it weighs is off."""
    args = ppo.Args(train_batch_size=8, ppo_mini_batch_size=64, val_n=4, kl_loss_coef=0.5, kl_coef=0.1, use_kl_in_reward=False, top_p=0.9)
    ppo.check(args, 8)
    assert args.ppo_mini_batch_size == 8 and args.val_n == 1  # four greedy answers would be four times the same
    warnings = capsys.readouterr().out
    assert all(word in warnings for word in ("--val_n 1", "--kl_loss_coef 0.5 does nothing without --use_kl_loss true", "ratio is biased"))
    assert "--kl_coef 0.1 does nothing without --use_kl_in_reward true" in warnings
    ppo.check(ppo.Args(val_n=4, val_temperature=1.0, kl_loss_coef=0.5, use_kl_loss=True, kl_coef=0.1), 8)
    ppo.check(ppo.Args(use_kl_in_reward=False), 8)
    assert capsys.readouterr().out == ""
    ppo.check(ppo.Args(use_kl_in_reward=False, ref_ema_steps=5), 8)
    assert "--ref_ema_steps does nothing" in capsys.readouterr().out
    ppo.check(ppo.Args(kl_ctrl="adaptive", kl_horizon=52), 8)  # a step changes the coefficient by .2 * 256 / 52, just below all of it
    assert capsys.readouterr().out == ""


@pytest.fixture(scope="module")
def bad_models(tmp_path_factory):
    """A model with another tokenizer; the same as a reward model without a template; one with two labels; one that knows 8 positions."""
    folder, mute = tmp_path_factory.mktemp("bad"), other_tokenizer()
    mute.chat_template = None
    save_value_model(folder / "other", LlamaConfig(**JUDGE), other_tokenizer())
    save_value_model(folder / "mute", LlamaConfig(**JUDGE), mute)
    save_value_model(folder / "two_labels", LlamaConfig(**JUDGE), demo_tokenizer(), num_labels=2)
    save_value_model(folder / "short", LlamaConfig(**JUDGE | {"max_position_embeddings": 8}), demo_tokenizer())
    return folder


BAD = {
    "unknown value": (dict(adv="gae"), ["--adv"]),
    "unknown estimator": (dict(kl_penalty="full"), ["--kl_penalty", "full", "low_var_kl"]),
    "no GPU": (dict(offload_policy="true"), ["--offload_policy true"]),
    "no model": (dict(model_path="no/such/model"), ["--model_path no/such/model"]),
    "no critic": (dict(critic_path="no/such/critic"), ["--critic_path no/such/critic"]),
    "no reward model": (dict(reward_model="no/such/judge"), ["--reward_model no/such/judge"]),
    "no cost model": (dict(cost_model="no/such/judge"), ["--cost_model no/such/judge"]),
    "critic of another family": (dict(critic_path="{bad}/other"), ["--critic_path", "{bad}/other", "tokenizer", "--model_path"]),
    "critic too short": (dict(critic_path="{bad}/short"), ["--critic_path", "{bad}/short", "8 positions", "--max_prompt_length 32"]),
    "critic with two labels": (dict(critic_path="{bad}/two_labels"), ["{bad}/two_labels", "label"]),
    "reward model without a template": (dict(reward_model="{bad}/mute"), ["--reward_model", "{bad}/mute", "chat template", "chat_template.jinja"]),
    "reward model with two labels": (dict(reward_model="{bad}/two_labels"), ["--reward_model {bad}/two_labels has 2 labels"]),
    "reward model without a head": (dict(reward_model="{demo}/model"), ["--reward_model {demo}/model", "sequence classification model with one"]),
    "too long": (dict(max_response_length=1000), ["--max_response_length 1000", "1024 positions"]),
    "no data": (dict(train_files="no_such.parquet"), ["no_such.parquet"]),
    "too few rows": (dict(train_batch_size=400, ppo_mini_batch_size=8), ["353 rows", "400"]),
    "no reward at all": (dict(reward_fn="none"), ["--reward_fn none", "--reward_model"]),
    "no reward file": (dict(reward_fn="no_such.py:reward"), ["--reward_fn no_such.py:reward"]),
    "no cost file": (dict(cost_fn="no_such.py:cost"), ["--cost_fn no_such.py:cost"]),
    "no checkpoint": (dict(resume_mode="no_such/global_step_4"), ["--resume_mode no_such/global_step_4"])}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_told_in_one_sentence(demo, bad_models, tmp_path, name):
    changed, words = BAD[name]
    fill = lambda x: x.format(bad=bad_models, demo=demo) if isinstance(x, str) else x
    done = fork(become_script, tmp_path, options(demo, tmp_path, **{k: fill(v) for k, v in ({"max_tokens_per_micro_batch": 8192} | changed).items()}, total_training_steps=1))
    assert done.codes[0] > 0
    last = done.err[0].strip().splitlines()[-1]
    assert "Traceback" not in done.err[0] and last.startswith("ppo.py: ") and all(fill(word) in last for word in words), done.err[0][-2000:]


def test_bad_input_is_told_once(demo, tmp_path):
    done = fork(become_script, tmp_path, options(demo, tmp_path, train_batch_size=9, ppo_mini_batch_size=3), ranks=2)
    assert min(done.codes) > 0
    assert len(done.err[0].strip().splitlines()) == 1 and "--ppo_mini_batch_size 3 can't be split over 2 GPUs" in done.err[0]
    assert done.err[1] == ""


def test_every_rank_needs_a_validation_prompt_for_the_reward_model(demo, reward_model, tmp_path):
    pq.write_table(pq.read_table(demo / "test.parquet").slice(0, 1), tmp_path / "one.parquet")
    done = fork(become_script, tmp_path, options(demo, tmp_path, val_files=tmp_path / "one.parquet", reward_model=reward_model), ranks=2)
    assert min(done.codes) > 0 and "Traceback" not in done.err[0] + done.err[1]
    assert "--val_files has 1 prompts" in done.err[0] and "2 GPUs" in done.err[0]
