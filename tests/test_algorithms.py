"""Every number of vectors/ that concerns grpo.py, and every public fault of advantages, KL and losses.

Each case is evaluated on the whole batch, row by row (a micro-batch each), and over two ranks that own alternate rows, or
alternate groups where rows of a group must stay together. An evaluate_* function returns what one rank contributes: tensors
of the whole batch's shape, 0 elsewhere, so that their sum over ranks is the answer. An expect_* function names the column.

| file | column | where ours is not verl's snapshot ("expected"), and why |
|---|---|---|
| policy_loss_ppo | expected | sum-norm: verl_2026_08, the snapshot forgets the mean over rows. All rows masked: 0, verl divides 0 by 0. NaN in padding: paper's dual clip, packed tokens have no padding |
| policy_loss_gspo, _sapo, _reinforce | expected | |
| policy_loss_cispo, _gpg | expected | sum-norm: verl_2026_08, as above |
| policy_loss_gmpo | expected, with a mean over the rows that have tokens (paper) | the snapshot's mean is over all rows, and ignores the counts of other ranks |
| policy_loss_cov | expected | ppo_kl of kl_cov is mean |log-ratio| there; ours is -log-ratio under every loss, recomputed here |
| agg_loss | paper, else expected | the empty batch: 0 (verl NaN). sum-norm: mean over rows |
| grpo_advantage | expected | group of one and constant group: exactly 0 (paper). The vectorised and float32 cases at rtol 1e-6: verl computes them in float32 |
| rloo, opo | paper | the group of one, for which verl keeps the raw reward (paper: null or 0): 0 |
| gpg | paper | verl's alpha counts scores of 0 in place of constant groups |
| reinforce_pp | expected advantages, verl_2026_08 returns | the snapshot leaves returns on padding |
| reinforce_pp_baseline | paper, sample std | the group of one |
| remax | paper | verl leaves values on masked positions |
| masked_whiten | expected on unmasked positions | equal values: paper, 0. Fewer than two values: 0, where verl raises |
| kl_penalty | verl_2026_08, else expected (its clamps of k3) | the snapshot raises for the + names |
| apply_kl_in_reward, adaptive_kl | expected | a horizon of 0 is a start-up error, an unknown type one of the command line |
| dynamic_sampling | paper | np.std of equal rewards isn't 0 |
| overlong_penalty | paper, else expected | floor at -factor; a buffer of 0 is off |
| tis | weights: paper; metrics: verl_2026_08, else expected; masks: paper, else expected | the snapshot's mean is of the untruncated weights; its k1 bounds are of the inverse ratio |
| ema_reference | expected | |
| entropy, logprob_from_logits | paper, else expected | bf16: ours is fp32, compared at 1e-2 |

gae, value_loss, safe_rlhf and reward_zscore belong to ppo.py; gsm8k_reward and math_reward to reward.py.
"""
import json
import math
import os
import re
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import grpo
from rollout import Sample
from test_grpo import VECTORS, close, environment, fork, run, stored, tensor, without_clock  # noqa: F401
from test_rollout import process_group  # noqa: F401

SLOW = bool(os.environ.get("SLOW"))
LAYOUTS = ["whole", "row by row", "two ranks"]


def same(value):
    """What every rank knows, as this rank's part of a sum over ranks."""
    return torch.as_tensor(value, dtype=torch.float64) / dist.get_world_size()


def at(mask, values):
    """Packed values back in their places of a (rows, columns) mask, 0 elsewhere."""
    return torch.zeros(mask.shape, dtype=torch.float64).masked_scatter(mask, values.detach().double())


def only(mask, rows):
    """The mask with all other rows blanked."""
    chosen = torch.zeros_like(mask)
    chosen[rows] = mask[rows]
    return chosen


def numbers_of(labels):
    return torch.tensor([sorted(set(labels)).index(x) for x in labels])


# ---- losses

LOSS = {"ppo": "vanilla", "gspo": "gspo", "cispo": "cispo", "gmpo": "geo_mean", "sapo": "sapo", "gpg": "gpg", "reinforce": "gpg", "cov": None}


def evaluate_policy_loss(file, case, rows, parts):
    given = case["inputs"]
    settings = {k: v for k, v in (given | given.get("policy_loss", {})).items() if k in vars(grpo.Args())}
    args = grpo.Args(**settings, loss=LOSS[file.removeprefix("policy_loss_")] or given["policy_loss"]["loss_mode"])
    mode = "seq-mean-token-mean" if args.loss in ("gspo", "sapo", "geo_mean") else given["loss_agg_mode"]  # verl's own choice for these
    mask, world = tensor(given["response_mask"]).bool(), given.get("global_batch_info", {})
    logp, advantages, old_logp = tensor(given["log_prob"]), tensor(given["advantages"]), tensor(given.get("old_log_prob", given.get("rollout_log_prob")))
    weights = tensor(given["rollout_is_weights"]) if "rollout_is_weights" in given else None
    mine, lengths = only(mask, rows), mask.sum(1)
    tokens, count = grpo.all_sum(lengths[rows].sum(), (lengths[rows] > 0).sum())
    chosen = torch.zeros_like(mask)
    if args.loss.endswith("_cov"):
        luck = torch.linspace(0, 1, mask.numel()).reshape(mask.shape)
        chosen = at(mine, grpo.covariant_tokens(args, logp[mine], old_logp[mine], advantages[mine], mask[mine], luck[mine])).bool()
    found = {"loss": torch.zeros((), dtype=torch.float64), "grad_log_prob": torch.zeros(mask.shape, dtype=torch.float64)}
    for part in parts:
        here = only(mask, part)
        row = torch.arange(len(mask)).repeat_interleave(here.sum(1))
        weight = grpo.loss_weights(lengths, mode, world.get("batch_num_tokens", tokens), world.get("global_batch_size", count), mask.shape[1])[row]
        leaf = logp[here].requires_grad_()
        token_loss, metrics = grpo.policy_loss(args, leaf, old_logp[here], advantages[here], row, torch.ones(len(row), dtype=torch.bool), chosen[here],
                                               None if weights is None else weights[here])
        loss = (weight * token_loss).sum() * world.get("dp_size", 1)
        loss.backward()
        found["loss"] += loss.detach()
        found["grad_log_prob"] += at(here, leaf.grad)
        for key, value in metrics.items():
            found[key] = found.get(key, 0) + value.double().sum() / max(1, tokens)
    return found


def expect_policy_loss(file, case):
    given, expected = case["inputs"], case["expected"] | case.get("verl_2026_08", {})
    mask = tensor(given["response_mask"]).bool()
    expected = {key: tensor(value) for key, value in expected.items()}
    if not mask.any():
        expected["loss"] = torch.tensor(0.0)
    if torch.isnan(tensor(given["log_prob"])).any():
        expected["loss"] = tensor(case["paper"]["loss_dual_clip"])
    if file == "policy_loss_gmpo" and "global_batch_info" not in given:  # with it, 2 / 16 is the same as the snapshot's 1 / 8
        factor = len(mask) / mask.any(1).sum()
        expected |= {key: expected[key] * factor for key in ("loss", "grad_log_prob")}
        close(expected["loss"], case.get("paper", {}).get("loss_mean_over_non_empty_rows", expected["loss"]))
    if given.get("policy_loss", {}).get("loss_mode") == "kl_cov":
        expected["ppo_kl"] = (tensor(given["old_log_prob"]) - tensor(given["log_prob"]))[mask].mean()
    expected["grad_log_prob"] = torch.where(mask, expected["grad_log_prob"], 0.0)
    return expected


def evaluate_agg_loss(file, case, rows, parts):
    given = case["inputs"]
    losses, mask = tensor(given["loss_mat"]), tensor(given["loss_mask"])
    lengths = mask.sum(1)
    tokens, count = grpo.all_sum(lengths[rows].sum(), (lengths[rows] > 0).sum())
    tokens, count = given.get("batch_num_tokens", tokens), given.get("global_batch_size", count)
    weight = lambda part: grpo.loss_weights(lengths[part], given["loss_agg_mode"], tokens, count, losses.shape[1])[:, None] * mask[part]
    return {"loss": sum((weight(part) * losses[part]).sum() for part in parts) * given.get("dp_size", 1)}


def expect_agg_loss(file, case):
    return {"loss": tensor(case.get("paper", case["expected"])["loss"])}


# ---- advantages

def evaluate_advantage(file, case, rows, parts):
    given, name = case["inputs"], case["name"]
    settings = given | given.get("config", {})
    kind = {"grpo_advantage": "grpo_passk" if "passk" in name else "grpo", "reinforce_pp": "reinforce_plus_plus",
            "reinforce_pp_baseline": "reinforce_plus_plus_baseline"}.get(file, file)
    args = grpo.Args(adv_estimator=kind, gamma=settings.get("gamma", 1.0), norm_adv_by_std_in_grpo=settings.get("norm_adv_by_std_in_grpo", True))
    mask = tensor(given["response_mask"]).bool()
    rewards = torch.tensor(given["token_level_rewards"], dtype=getattr(torch, given.get("dtype", "float64")))
    mine, lengths = only(mask, rows), mask.sum(1)[rows]
    group = numbers_of(given.get("index", list(range(len(mask)))))[rows]
    per_token = kind in ("reinforce_plus_plus", "remax")
    token_rewards = rewards[mine].double() if per_token else torch.zeros(int(mine.sum()), dtype=torch.float64)
    row_rewards = torch.zeros(len(rows), dtype=torch.float64) if per_token else rewards.sum(1)[rows]  # as verl: of all columns
    baselines = torch.tensor(given["reward_baselines"])[rows] if kind == "remax" else None
    if not rows:  # a rank without a group, which the script never has, stands by with a missing response
        row_rewards, lengths, group = torch.tensor([float("nan")]), torch.tensor([0]), torch.tensor([0])
    found = {"advantages": at(mine, grpo.token_advantages(args, row_rewards, token_rewards, lengths, group, torch.ones(len(token_rewards), dtype=torch.bool), baselines))}
    if per_token:
        found["returns"] = at(mine, grpo.returns_to_go(token_rewards, lengths, args.gamma))
    return found


def expect_advantage(file, case):
    given, columns = case["inputs"], case["expected"] | case.get("paper", {}) | case.get("verl_2026_08", {})
    mask = tensor(given["response_mask"])
    if file in ("rloo", "opo", "gpg"):
        return {"advantages": tensor([x or 0 for x in columns["advantage_per_row"]])[:, None] * mask}
    if file == "reinforce_pp_baseline":
        return {"advantages": tensor(columns["advantages_sample_std"])}
    if file in ("reinforce_pp", "remax"):
        return {"advantages": tensor(columns["advantages"]) * mask, "returns": tensor(columns["returns"]) * mask}
    scores, labels = tensor(given["token_level_rewards"]).sum(1), given["index"]
    constant = torch.tensor([len({scores[j].item() for j, other in enumerate(labels) if other == label}) == 1 for label in labels])
    return {"advantages": torch.where(constant[:, None], 0.0, tensor(case["expected"]["advantages"]))}


def evaluate_masked_whiten(file, case, rows, parts):
    given = case["inputs"]
    values, mask = tensor(given["values"]), tensor(given["mask"]).bool()
    if "axis" in given:
        row = torch.arange(len(rows)).repeat_interleave(mask.shape[1])
        means = grpo.row_mean(values[rows].flatten(), row, mask[rows].flatten()).reshape(len(rows), -1)[:, 0]
        return {"mean": torch.zeros(len(mask), dtype=torch.float64).index_copy(0, torch.tensor(rows), means)}
    everywhere = only(torch.ones_like(mask), rows)
    return {"whitened": at(everywhere, grpo.whiten(values[everywhere], mask[everywhere]))}


def expect_masked_whiten(file, case):
    if "axis" in case["inputs"]:
        return {"mean": tensor(case["expected"]["mean"])}
    values, mask = tensor(case["inputs"]["values"]), tensor(case["inputs"]["mask"])
    chosen = values[mask.bool()]
    return {"whitened": torch.zeros_like(mask) if len(chosen) < 2 or (chosen == chosen[0]).all() else tensor(case["expected"]["whitened"]) * mask}


# ---- KL

def evaluate_kl_penalty(file, case, rows, parts):
    given = case["inputs"]
    found = {"kl": torch.zeros(len(given["logprob"]), dtype=torch.float64)}
    found["grad_of_sum_wrt_logprob"] = found["kl"].clone()
    for part in parts:
        logp = tensor(given["logprob"])[part].requires_grad_()
        value = grpo.kl_penalty(logp, tensor(given["ref_logprob"])[part], given["kl_penalty"])
        value.sum().backward()
        found["kl"][part], found["grad_of_sum_wrt_logprob"][part] = value.detach(), logp.grad
    return found


def expect_kl_penalty(file, case):
    return {key: tensor(value) for key, value in case.get("verl_2026_08", case["expected"]).items()}


def evaluate_apply_kl_in_reward(file, case, rows, parts):
    given, controller = case["inputs"], case["inputs"]["controller"]
    mine = only(tensor(given["response_mask"]).bool(), rows)
    scores, old_logp, ref_logp = (tensor(given[key])[mine] for key in ("token_level_scores", "old_log_probs", "ref_log_prob"))
    row = torch.arange(len(rows)).repeat_interleave(mine.sum(1)[rows])
    rewards, kl, count = grpo.kl_in_reward(scores, old_logp, ref_logp, row, len(rows), given["kl_penalty"], controller["kl_coef"])
    args = grpo.Args(kl_ctrl=controller["type"], kl_target=controller.get("target_kl", 0.1), kl_horizon=controller.get("horizon", 10000))
    return {"token_level_rewards": at(mine, rewards), "current_kl": same(kl), "coef_after": same(grpo.next_kl_coef(args, controller["kl_coef"], kl, count))}


def expect_apply_kl_in_reward(file, case):
    return {"token_level_rewards": tensor(case["expected"]["token_level_rewards"]) * tensor(case["inputs"]["response_mask"]),
            "current_kl": tensor(case["expected"]["current_kl"]), "coef_after": tensor(case["expected"]["coef_after"])}


def evaluate_adaptive_kl(file, case, rows, parts):
    given = case["inputs"]
    args, coefs = grpo.Args(kl_ctrl=given["type"], kl_target=given["target_kl"], kl_horizon=given["horizon"]), [given["kl_coef"]]
    for kl, count in zip(given["current_kl"], given["n_steps"]):
        coefs.append(grpo.next_kl_coef(args, coefs[-1], kl, count))
    return {"value_after_each_update": same(coefs[1:])}


def expect_adaptive_kl(file, case):
    return {"value_after_each_update": tensor(case["expected"]["value_after_each_update"])}


# ---- DAPO, engine against trainer, reference, head

def evaluate_dynamic_sampling(file, case, rows, parts):
    group = numbers_of(case["inputs"]["index"])[rows]
    varied = grpo.varied_groups(tensor(case["inputs"]["metric"])[rows], group)[group]
    return {"kept_rows": torch.zeros(len(case["inputs"]["index"]), dtype=torch.float64).index_copy(0, torch.tensor(rows), varied.double())}


def expect_dynamic_sampling(file, case):
    labels, paper = case["inputs"]["index"], case["paper"]
    assert {labels[i] for i in paper["kept_rows"]} == set(paper["kept_groups"])
    return {"kept_rows": torch.tensor([float(i in paper["kept_rows"]) for i in range(len(labels))])}


def evaluate_overlong_penalty(file, case, rows, parts):
    given, lengths = case["inputs"], case["inputs"]["valid_response_length"]
    args = grpo.Args(max_response_length=given["max_resp_len"], overlong_buffer_len=given["overlong_buffer_len"] if given["enable"] else 0,
                     overlong_penalty_factor=given["penalty_factor"])
    shaped = grpo.shaped_rewards(args, [SimpleNamespace(score=given["score"]) for _ in rows], [Sample([1], [5] * lengths[i], "stop", None) for i in rows])
    return {"overlong_penalty": torch.zeros(len(lengths), dtype=torch.float64).index_copy(0, torch.tensor(rows), shaped - given["score"])}


def expect_overlong_penalty(file, case):
    off = not case["inputs"]["enable"] or case["inputs"]["overlong_buffer_len"] == 0
    return {"overlong_penalty": torch.zeros(len(case["inputs"]["valid_response_length"])) if off else tensor(case["paper"]["overlong_penalty"])}


def evaluate_tis(file, case, rows, parts):
    given = case["inputs"]
    mask = tensor(given["response_mask"]).bool()
    args = grpo.Args(**{k: str(v) if k == "rollout_rs_threshold" else v for k, v in given.items() if k in vars(grpo.Args())})
    everywhere = only(torch.ones_like(mask), rows)  # the mask is the function's business
    weights, keep, metrics = grpo.rollout_correction(args, tensor(given["log_ratio_train_minus_rollout"])[everywhere], everywhere.sum(1)[rows], mask[everywhere])
    found = {"weights": at(everywhere, weights)} if "rollout_is" in given else {"modified_response_mask": at(everywhere, keep)}
    return found | {key.replace("rollout/", "rollout_"): same(value) for key, value in metrics.items()}


def expect_tis(file, case):
    expected, paper = case["expected"] | case.get("verl_2026_08", {}), case.get("paper", {})
    if "rollout_is" in case["inputs"]:
        return {"weights": tensor(paper["weights"])} | {key: tensor(expected[key]) for key in ("rollout_is_mean", "rollout_is_eff_sample_size")}
    return {"modified_response_mask": tensor(paper.get("mask_keep_if_train_over_rollout_ratio_in_bounds", expected["modified_response_mask"]))}


def evaluate_ema_reference(file, case, rows, parts):
    given = case["inputs"]
    ref, policy = (torch.nn.ParameterList([tensor(given[key])[rows]]) for key in ("ema_init", "policy_init"))
    found = torch.zeros(given["steps"], len(given["ema_init"]), dtype=torch.float64)
    for step in range(given["steps"]):
        grpo.ema_update(ref, policy, 1 - given["ema_weight_on_old"])
        found[step, rows] = ref[0].detach()
        policy[0].data += given["policy_increment_per_step"]
    return {"ema_after_each_step": found}


def expect_ema_reference(file, case):
    return {"ema_after_each_step": tensor(case["expected"]["ema_after_each_step"])}


def head(logits, labels):
    """head_logprobs of logits (T, V): the identity for a head; a logit of -inf comes by way of the bias, where no 0 meets it."""
    if logits.isinf().any():
        return tuple(torch.cat(x) for x in zip(*(grpo.head_logprobs(torch.zeros_like(z)[None], torch.zeros(len(z), len(z), dtype=z.dtype), z, y[None], 1.0, False)
                                                 for z, y in zip(logits, labels))))
    return grpo.head_logprobs(logits, torch.eye(logits.shape[1], dtype=logits.dtype), None, labels, 1.0, False)


def evaluate_entropy(file, case, rows, parts):
    given = case["inputs"]
    logits = tensor(given["logits"])
    logits = logits if logits.dim() == 3 else logits[:, None]
    entropy = torch.zeros(logits.shape[:2], dtype=torch.float64)
    for part in parts:
        entropy[part] = head(logits[part].flatten(0, 1), torch.zeros(logits[part].shape[:2], dtype=torch.long).flatten())[1].reshape(len(part), -1)
    if "loss_agg_mode" not in given:
        return {"entropy": entropy.reshape(tensor(given["logits"]).shape[:-1])}
    mask = {"loss_mat": entropy.tolist(), "loss_mask": given["response_mask"], "loss_agg_mode": given["loss_agg_mode"]}
    return {"entropy_loss": evaluate_agg_loss(file, {"inputs": mask}, rows, parts)["loss"]}


def expect_entropy(file, case):
    return {key: tensor(value) for key, value in case.get("paper", case["expected"]).items()}


def evaluate_logprob_from_logits(file, case, rows, parts):
    given = case["inputs"]
    logits, width = tensor(given["logits"]), given.get("response_length", 0)
    labels = torch.tensor(given["input_ids" if width else "labels"])
    if width:
        logits, labels = logits[:, -width - 1:-1], labels[:, -width:]
    logits = logits.to(getattr(torch, given.get("dtype", "float64")))
    found = torch.zeros(labels.shape, dtype=torch.float64)
    for part in parts:
        found[part] = head(logits[part].flatten(0, 1), labels[part].flatten())[0].reshape(len(part), -1).double()
    return {"logprob": found}


expect_logprob_from_logits = expect_entropy


# ---- all of them

FILES = {f"policy_loss_{name}": (evaluate_policy_loss, expect_policy_loss) for name in LOSS}
FILES |= {name: (evaluate_advantage, expect_advantage) for name in ("grpo_advantage", "rloo", "reinforce_pp", "reinforce_pp_baseline", "remax", "opo", "gpg")}
FILES |= {name: (globals()[f"evaluate_{name}"], globals()[f"expect_{name}"]) for name in (
    "agg_loss", "masked_whiten", "kl_penalty", "apply_kl_in_reward", "adaptive_kl", "dynamic_sampling", "overlong_penalty", "tis", "ema_reference", "entropy",
    "logprob_from_logits")}
ELSEWHERE = {"gae", "value_loss", "safe_rlhf", "reward_zscore", "gsm8k_reward", "math_reward"}
CASES = {(file, case["name"]): case for file in FILES for case in json.loads((VECTORS / f"{file}.json").read_text())["cases"]}
# verl raises, and so do we, or stop before it comes to that: test_raising_cases below
RAISING = {key for key, case in CASES.items() if "raises" in case["expected"] and "verl_2026_08" not in case and key[0] != "masked_whiten"}


def row_labels(case):
    """What must stay together on a rank: the group of each row, or its number."""
    given = case["inputs"]
    if "index" in given:
        return given["index"]
    first = next((given[key] for key in ("response_mask", "mask", "loss_mask", "logits", "logprob", "valid_response_length", "ema_init") if key in given), [0])
    return list(range(len(first)))


def evaluate(key, layout, rank=0):
    case = CASES[key]
    number = numbers_of(row_labels(case))
    rows = [i for i, n in enumerate(number.tolist()) if layout != "two ranks" or n % 2 == rank]
    parts = [rows] if layout == "whole" else [[row] for row in rows]
    return FILES[key[0]][0](key[0], case, rows, parts)


def two_rank_worker(folder):
    rank, _, _ = grpo.init_distributed()
    found = {}
    for key in (key for key in CASES if key not in RAISING):
        try:
            found[key] = evaluate(key, "two ranks", rank)
        except Exception:
            found[key] = traceback.format_exc()
    torch.save(found, folder / f"rank_{rank}.pt")


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory):
    """{(file, case): contributions summed over two processes}."""
    folder = tmp_path_factory.mktemp("two_ranks")
    done = fork(two_rank_worker, folder, folder, ranks=2)
    assert done.codes == [0, 0], done.err
    a, b = (torch.load(folder / f"rank_{rank}.pt") for rank in (0, 1))
    return {key: (a[key], b[key]) if isinstance(a[key], str) or isinstance(b[key], str) else {k: a[key][k] + b[key][k] for k in a[key]} for key in a}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("file, name", [key for key in CASES if key not in RAISING])
def test_vector(process_group, of_two_ranks, file, name, layout):
    case = CASES[file, name]
    found = of_two_ranks[file, name] if layout == "two ranks" else evaluate((file, name), layout)
    assert isinstance(found, dict), found
    expected = FILES[file][1](file, case)
    single = case["inputs"].get("dtype") == "float32" or "vectorized" in name  # verl's own arithmetic there
    rtol, atol = (1e-2, 1e-2) if case["inputs"].get("dtype") == "bfloat16" else (1e-6, 1e-7) if single else (1e-7, 1e-8)
    for key in expected.keys() & found.keys():
        close(found[key], expected[key], rtol=rtol, atol=atol)
    compared = {"loss", "advantages", "whitened", "mean", "kl", "token_level_rewards", "value_after_each_update", "kept_rows", "overlong_penalty", "weights",
                "modified_response_mask", "ema_after_each_step", "entropy", "entropy_loss", "logprob"} & expected.keys()
    assert compared and compared <= found.keys() and ("grad_log_prob" in found) == ("grad_log_prob" in expected)


def test_every_file_is_tested_here_or_elsewhere():
    assert {path.stem for path in VECTORS.glob("*.json")} == FILES.keys() | ELSEWHERE


def test_raising_cases():
    """Six in all: an estimator nobody has, an unknown controller, a horizon of 0 and a pass@k group of one; and two of whitening, which is 0 here."""
    for file, name in RAISING:
        given = CASES[file, name]["inputs"]
        if file == "kl_penalty":
            with pytest.raises(KeyError):
                grpo.kl_penalty(tensor(given["logprob"]), tensor(given["ref_logprob"]), given["kl_penalty"])
        elif file == "adaptive_kl" and given["type"] != "adaptive":
            with pytest.raises(SystemExit):
                grpo.parse_args(grpo.Args, ["--kl_ctrl", given["type"]])
        elif file == "adaptive_kl":
            with pytest.raises(ValueError, match=f"--kl_horizon {given['horizon']} "):
                grpo.check(grpo.Args(use_kl_in_reward=True, kl_ctrl="adaptive", kl_horizon=given["horizon"]), 1)
        else:
            assert (file, CASES[file, name]["expected"]["raises"]) == ("grpo_advantage", "ValueError") and "passk" in name
            with pytest.raises(ValueError, match="--n 1 "):
                grpo.check(grpo.Args(adv_estimator="grpo_passk", n=1), 1)
            assert grpo.group_advantages("grpo_passk", torch.tensor([3.0, 1.0, 0.5]), torch.tensor([0, 1, 1])).tolist()[0] == 0


# ---- section D of the public faults, by number (42, GAE across masked cells, is ppo.py's)

def test_fault_34_all_masked_micro_batch():
    """Masks [[0, 0], [1, 1]], a row a micro-batch, losses 1: total 1, of which the first gives exactly 0, with a gradient of 0."""
    parts = []
    for length in (0, 2):
        losses = torch.ones(2, requires_grad=True)
        weight = grpo.loss_weights(torch.tensor([0, 2]), "token-mean", 2, 1, 2)[length // 2] * (length > 0)
        parts.append(torch.where(weight > 0, losses * weight, 0.0).sum())
        parts[-1].backward()
        assert losses.grad.isfinite().all()
    assert [p.item() for p in parts] == [0.0, 1.0]


def test_fault_35_nan_in_a_masked_cell(process_group):
    """Values [nan, 2, 4], mask [0, 1, 1]: mean 3, gradient 0 in the masked cell; whitened [0, -.7071, .7071]."""
    values, mask, row = torch.tensor([float("nan"), 2.0, 4.0], requires_grad=True), torch.tensor([False, True, True]), torch.zeros(3, dtype=torch.long)
    mean = grpo.row_mean(values, row, mask)
    assert mean.tolist() == [3, 3, 3]
    mean[0].backward()
    assert values.grad.tolist() == [0, 0.5, 0.5]
    close(grpo.whiten(values.detach().double(), mask), [0, -0.707107, 0.707107], atol=1e-6)


def test_fault_37_k3_does_not_overflow():
    """log-prob -45 against -5: 10 with a gradient of 0, in bf16 too; differences of .5: .14872 and .10653."""
    for dtype in (torch.float32, torch.bfloat16):
        logp = torch.tensor([-45.0], dtype=dtype, requires_grad=True)
        value = grpo.kl_penalty(logp, torch.tensor([-5.0], dtype=dtype), "k3")
        value.backward()
        assert value.item() == 10 and logp.grad.item() == 0
    close(grpo.kl_penalty(torch.tensor([-1.5, -1.0]), torch.tensor([-1.0, -1.5]), "k3"), [0.14872, 0.10653], atol=1e-5)


def test_fault_38_a_group_or_a_batch_of_one(process_group):
    """Ours is 0 with a start-up error for estimators that compare siblings, where verl gives the raw reward; a single token whitens to 0."""
    for kind in ("grpo", "rloo", "opo", "gpg", "grpo_passk", "reinforce_plus_plus_baseline"):
        assert grpo.group_advantages(kind, torch.tensor([0.7]), torch.tensor([0]), torch.tensor([3])).tolist() == [0]
        with pytest.raises(ValueError, match="--n 1 "):
            grpo.check(grpo.Args(adv_estimator=kind, n=1), 1)
    for kind in ("reinforce_plus_plus", "remax"):  # need no siblings
        grpo.check(grpo.Args(adv_estimator=kind, n=1), 1)
    assert grpo.whiten(torch.tensor([0.7], dtype=torch.float64), torch.tensor([True])).tolist() == [0]


@pytest.mark.parametrize("kind", ["grpo", "rloo", "opo", "gpg", "grpo_passk", "reinforce_plus_plus_baseline"])
def test_fault_39_equal_rewards(process_group, kind):
    """Ten rewards of 1.1 in fp32: exactly 0."""
    rewards = torch.full((10,), 1.1)
    assert grpo.group_advantages(kind, rewards, torch.zeros(10, dtype=torch.long), torch.arange(10)).tolist() == [0] * 10


def test_fault_40_groups_in_any_order():
    """Prompts a, b, a, b with rewards 1, 1, 0, 1: .7071, 0, -.7071, 0."""
    close(grpo.group_advantages("grpo", torch.tensor([1.0, 1, 0, 1]), torch.tensor([0, 1, 0, 1])), [0.707107, 0, -0.707107, 0], atol=2e-6)


@pytest.mark.parametrize("kind", ["grpo", "rloo", "opo", "gpg", "grpo_passk", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax"])
@pytest.mark.parametrize("norm", [True, False])
def test_fault_40_shuffled_rows(process_group, kind, norm):
    generator = torch.Generator().manual_seed(0)
    rewards, lengths, group = torch.randn(24, generator=generator).double(), torch.randint(0, 6, (24,), generator=generator), torch.arange(24) // 4
    rewards[5] = float("nan")
    args = grpo.Args(adv_estimator=kind, norm_adv_by_std_in_grpo=norm)

    def padded(order):  # (24, 6): the advantages of each row in the order of the rows
        mask = (torch.arange(6) < lengths[order, None])
        row_mask = ~rewards[order].isnan().repeat_interleave(lengths[order])
        found = grpo.token_advantages(args, rewards[order], torch.zeros(int(lengths.sum()), dtype=torch.float64), lengths[order], group[order], row_mask, torch.ones(24))
        return torch.zeros(24, 6, dtype=torch.float64).index_copy(0, order, at(mask, found))
    plain = padded(torch.arange(24))
    assert plain.abs().max() > 0.1 and (plain[5] == 0).all() and plain.isfinite().all()
    close(padded(torch.randperm(24, generator=generator)), plain, rtol=1e-12, atol=1e-14)


def test_fault_43_kl_is_charged_once_with_the_right_sign(process_group, capsys):
    """Score 1, log-probs [-1, -2], reference [-1.5, -1.8], weight .1: rewards [-.05, 1.02]. In the loss +weight * k3, and rewards stay."""
    logp, ref_logp = torch.tensor([-1.0, -2.0], dtype=torch.float64), torch.tensor([-1.5, -1.8], dtype=torch.float64)
    rewards, _, _ = grpo.kl_in_reward(torch.tensor([0.0, 1.0], dtype=torch.float64), logp, ref_logp, torch.tensor([0, 0]), 1, "kl", 0.1)
    close(rewards, [-0.05, 1.02])
    assert (grpo.kl_penalty(logp, ref_logp, "k3") >= 0).all()
    args = grpo.Args()
    assert not args.use_kl_in_reward and not args.use_kl_loss  # each by its own switch
    for changed, word in (dict(kl_coef=0.1), "--kl_coef 0.1 does nothing"), (dict(kl_loss_coef=0.1), "--kl_loss_coef 0.1 does nothing"):
        grpo.check(grpo.Args(**changed), 1)
        assert word in capsys.readouterr().out
    grpo.check(grpo.Args(kl_coef=0.1, use_kl_in_reward=True, kl_loss_coef=0.1, use_kl_loss=True), 1)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("limit, used, order, surplus", [(3, 3, "1a 3a 3b", 0), (4, 4, "1a 3a 3b 4a", 2)])
def test_fault_44_dynamic_sampling(limit, used, order, surplus):
    """Four groups wanted; batches of four hold 1, 0, 2 and 3 usable ones. Three draws: train on three. Four: the first four, two are left over."""
    drawn = []

    def draw(k):
        drawn.append(k)
        return [[(f"{k + 1}{'abcd'[i]}", SimpleNamespace(score=s)) for s in ((1.0, 0.0) if i < (1, 0, 2, 3)[k] else (1.0, 1.0))] for i in range(4)]
    groups, found, metrics = grpo.fill_batch(draw, 4, limit)
    assert found == used and drawn == list(range(limit)) and len(groups) == 4
    assert " ".join(group[0][0] for group in groups[:used]) == order
    assert all(len({score.score for _, score in group}) == 1 for group in groups[used:])
    assert metrics == {"training/gen_batches": limit, "training/groups_used": used, "training/groups_constant": 4 * limit - used - surplus,
                       "training/groups_surplus": surplus, "training/sampled_score_mean": pytest.approx(1 - (used + surplus) / (8 * limit))}


def test_dynamic_sampling_stops_when_full():
    """Two groups wanted, both usable: one draw. The constant ones of a draw count, missing scores don't make a group varied."""
    score = lambda *values: [(SimpleNamespace(score=v),) for v in values]
    groups, used, metrics = grpo.fill_batch(lambda k: [score(1.0, 0.0), score(1.0, 1.0), score(0.0, 0.5), score(0.5, math.nan)], 2, 0)
    assert (used, metrics["training/gen_batches"], metrics["training/groups_constant"], metrics["training/groups_surplus"]) == (2, 1, 2, 0)
    assert [[response[0].score for response in group] for group in groups] == [[1.0, 0.0], [0.0, 0.5]]


def test_fault_45_adaptive_kl():
    """Coefficient .02, target .1, horizon 10000, 500 responses: a KL of .16 makes it .0202, one of .09 .0199. (Resuming: below.)"""
    args = grpo.Args(kl_ctrl="adaptive", kl_target=0.1, kl_horizon=10000)
    assert grpo.next_kl_coef(args, 0.02, 0.16, 500) == pytest.approx(0.0202) and grpo.next_kl_coef(args, 0.02, 0.09, 500) == pytest.approx(0.0199)


# ---- by hand

def test_shaped_rewards_by_hand():
    """Lengths 2, 8, 9, 10 of at most 10, buffer 4: overlong penalties 0, -.5, -.75, -1 (times 2); length penalty .1 a tenth of the length."""
    samples = [Sample([1], [5] * n, "stop", None) for n in (2, 8, 9, 10)]
    scores = [SimpleNamespace(score=s) for s in (1.0, 0.0, float("nan"), 1.0)]
    shaped = grpo.shaped_rewards(grpo.Args(max_response_length=10, overlong_buffer_len=4, overlong_penalty_factor=2.0, length_penalty=0.1), scores, samples)
    close(shaped.nan_to_num(99), [0.98, -1.08, 99, -1.1])
    assert grpo.shaped_rewards(grpo.Args(), scores, samples).nan_to_num(99).tolist() == [1, 0, 99, 1]


def test_passk_by_hand():
    """Rewards 1, .25, 0, nan: the lead of the best, .75; with two best ones nothing. Sample std of [1, .25, 0]: .52042."""
    nan = float("nan")
    given = torch.tensor([1, 0.25, 0, nan, 1, 1, 0, 0]), torch.arange(8) // 4
    close(grpo.group_advantages("grpo_passk", *given, norm_by_std=False), [0.75, 0, 0, 0, 0, 0, 0, 0])
    close(grpo.group_advantages("grpo_passk", *given)[0], 0.75 / (0.5204165 + 1e-6), rtol=1e-6)


def test_clip_cov_takes_its_share_at_random(process_group):
    """40 tokens, half of them candidates, a share of a tenth: the 4 luckiest candidates."""
    args = grpo.Args(loss="clip_cov", clip_cov_ratio=0.1, clip_cov_lb=0.5, clip_cov_ub=5.0)
    advantages, logp = torch.tensor([3.0, 1.0] * 20), torch.tensor([-1.0, -3.0, -3.0, -1.0] * 10)  # less their means: +-1; covariances 1, 1, -1, -1
    luck = torch.rand(40, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(40) > -1
    candidates = [i for i in range(40) if i % 4 < 2]
    chosen = grpo.covariant_tokens(args, logp, logp, advantages, mask, luck)
    assert chosen.nonzero()[:, 0].tolist() == sorted(sorted(candidates, key=lambda i: -luck[i])[:4])
    mask = torch.arange(40) < 20  # statistics and shares of the unmasked tokens alone
    assert grpo.covariant_tokens(args, logp, logp, advantages, mask, luck).nonzero()[:, 0].tolist() == sorted(sorted(candidates[:10], key=lambda i: -luck[i])[:2])


def test_gspo_by_hand():
    """Log-ratios 1 and 3: both tokens have the ratio e^2, of which at A = -1 each loses e^2 / 2 in the mean. A mean of 12 is cut at 10, with no gradient."""
    args = grpo.Args(loss="gspo")
    for log_ratios, ratio, slope in ([1.0, 3.0], math.e**2, math.e**2 / 2), ([11.0, 13.0], math.e**10, 0.0):
        logp = torch.tensor(log_ratios, dtype=torch.float64, requires_grad=True)
        loss, _ = grpo.policy_loss(args, logp, torch.zeros(2, dtype=torch.float64), torch.tensor([-1.0, -1.0]), torch.tensor([0, 0]), torch.tensor([True, True]))
        loss.mean().backward()
        close(loss.detach(), [ratio, ratio])
        close(logp.grad, [slope, slope])


@pytest.mark.parametrize("changed, words", [
    (dict(rollout_rs="token_k4"), ["--rollout_rs token_k4", "can't read token_k4"]), (dict(rollout_rs="token,sequence"), ["--rollout_rs token,sequence", "no bounds", "as many"]),
    (dict(rollout_rs="token", rollout_rs_threshold="a_2"), ["--rollout_rs_threshold a_2"]), (dict(rollout_is_threshold=0.0), ["--rollout_is_threshold 0.0"]),
    (dict(overlong_buffer_len=300), ["--overlong_buffer_len 300", "256"]), (dict(ignore_eos=True, mask_truncated=True), ["--mask_truncated true"]),
    (dict(filter_groups=True, n=1, adv_estimator="remax"), ["--n 1", "--filter_groups"]), (dict(kl_target=0.0), ["--kl_target 0.0"]),
    (dict(kl_ctrl="adaptive", kl_horizon=400), ["--kl_horizon 400", "2048", "negative"]), (dict(gamma=1.5), ["--gamma 1.5"]), (dict(ref_ema_alpha=2.0), ["--ref_ema_alpha 2.0"])])
def test_check_names_the_algorithms_options(changed, words):
    with pytest.raises(ValueError) as error:
        grpo.check(grpo.Args(**changed), 1)
    assert all(word in str(error.value) for word in words), error.value


def test_check_warns_and_sets(capsys):
    args = grpo.Args(loss="gspo", ref_ema_steps=5, rollout_is="token")
    grpo.check(args, 1)
    said = capsys.readouterr().out
    assert "--loss gspo is meant for --loss_agg_mode seq-mean-token-mean" in said and "--ref_ema_steps does nothing" in said
    assert args.rollout_logprobs == 1


# ---- in the script

def algorithms(mini, length):
    """{ALGO: options} of run.sh's case block, with its MINI and LENGTH."""
    lines = re.findall(r"^  (\w+)\) (?:options\+=\((.*?)\))?;(?:| .*);", (Path(grpo.__file__).parent / "run.sh").read_text(), re.M)
    plain = {name: words.replace("$((LENGTH / 5))", str(length // 5)).replace("$MINI", str(mini)).split() for name, words in lines}
    return {name: dict(zip((w[2:] for w in words[::2]), words[1::2], strict=True)) for name, words in plain.items() if name != "ppo"}


NAMES = "grpo dr_grpo dapo gspo rloo reinforce_pp reinforce_pp_baseline remax opo gpg passk cispo gmpo sapo clip_cov kl_cov".split()
COMBINED = {  # an ALGO and what else goes with it; with shares of Clip-Cov and KL-Cov that are more than one token here
    "dapo": dict(loss="gspo", rollout_is="sequence", rollout_is_batch_normalize="true", top_p=0.9, mask_truncated="true", max_response_length=4, overlong_buffer_len=2),
    "reinforce_pp": dict(loss="clip_cov", clip_cov_ratio=0.2, clip_cov_lb=-100, clip_cov_ub=100, kl_coef=0.1, kl_ctrl="adaptive", kl_horizon=10),
    "gpg": dict(loss="kl_cov", kl_cov_ratio=0.3, ppo_kl_coef=10, use_kl_loss="true", kl_loss_coef=0.1, ref_ema_steps=1, rollout_rs="token,seq_mean_k3", rollout_rs_threshold="0.98_1.02,0.1", top_p=0.9),
    "remax": dict(loss="geo_mean", loss_agg_mode="seq-mean-token-mean", clip_ratio_low=0.01, clip_ratio_high=0.01, rollout_is="token", top_p=0.9, length_penalty=0.3)}
COMBINED |= {name: {} for name in NAMES if SLOW and name not in COMBINED}


def test_run_sh_knows_them():
    assert list(algorithms(16, 16)) == NAMES


@pytest.mark.parametrize("name", COMBINED)
def test_two_ranks_in_small_pieces_equal_one(process_group, demo, tmp_path, name):
    """Two steps of two updates: on one rank in one piece, on two ranks with a sample or two a micro-batch. Metrics, and both of AdamW's moments."""
    given = {"train_batch_size": 8} | algorithms(4, 10)[name] | COMBINED[name]
    rows, moments = [], []
    for ranks, budget in (1, 4096), (2, 60):
        (tmp_path / str(ranks)).mkdir()
        done = run(demo, tmp_path / str(ranks), ranks=ranks, max_tokens_per_micro_batch=budget, ppo_mini_batch_size=4, lr=2e-4, total_training_steps=2, save_freq=2,
                   max_grad_norm=1e9, rollout_logprobs=1, seed=1, **given)
        rows.append(done.rows)
        moments.append(stored(done.path / "global_step_2/actor"))
    for one, two, rel in zip(*rows, (1e-5, 1e-3)):  # AdamW magnifies rounding
        assert one["actor/grad_norm"] > 1e-3 and one["actor/skipped_updates"] == 0
        for key in (key for key in one if not key.startswith(("timing", "perf", "rollout/k", "rollout/probs"))):
            assert two[key] == pytest.approx(one[key], rel=rel, abs=1e-5), key
    for kind in ("exp_avg", "exp_avg_sq"):
        largest = max(m.abs().max().item() for key, m in moments[0].items() if key.endswith(kind))
        for key in (key for key in moments[0] if key.endswith(kind)):
            close(moments[1][key], moments[0][key], rtol=0, atol=1e-3 * largest)


def test_resumed_run_equals_the_uninterrupted_one(process_group, demo, tmp_path):
    """With all that has a state: batches drawn by dynamic sampling, the adaptive KL coefficient (fault 45), the moving reference (fault 57)."""
    given = dict(filter_groups="true", max_num_gen_batches=3, use_kl_in_reward="true", kl_coef=0.05, kl_ctrl="adaptive", kl_horizon=100, kl_target=0.01,
                 use_kl_loss="true", kl_loss_coef=0.01, ref_ema_steps=1, ref_ema_alpha=0.6, lr=1e-3, save_freq=2)
    for name in ("straight", "stopped"):
        (tmp_path / name).mkdir()
    straight = run(demo, tmp_path / "straight", total_training_steps=4, **given)
    run(demo, tmp_path / "stopped", total_training_steps=2, **given)
    resumed = run(demo, tmp_path / "stopped", total_training_steps=4, **given)
    assert "global_step_2" in resumed.out
    for a, b in zip(straight.rows, resumed.rows, strict=True):
        assert without_clock(a) == without_clock(b)
    a, b = ({f"{part}.{k}": v for part in ("actor", "ref") for k, v in stored(done.path / "global_step_4" / part).items()} for done in (straight, resumed))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    state = json.loads((resumed.path / "global_step_4/state.json").read_text())
    assert state["position"] == sum(row["training/gen_batches"] for row in straight.rows) > 4
    coefs = [row["actor/reward_kl_penalty_coeff"] for row in straight.rows] + [state["kl_coef"]]
    for row, coef, following in zip(straight.rows, coefs, coefs[1:]):
        assert following == pytest.approx(coef * (1 + min(max(row["actor/reward_kl_penalty"] / 0.01 - 1, -0.2), 0.2) * 16 / 100), rel=1e-12)
    assert straight.rows[0]["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-6) and straight.rows[-1]["actor/reward_kl_penalty"] > 1e-4


def test_reference_moves(process_group, demo, tmp_path):
    """By .6 of the way to the policy after the second step of two, from where the model began; and it is what the checkpoint holds."""
    done = run(demo, tmp_path, use_kl_loss="true", ref_ema_steps=2, ref_ema_alpha=0.6, total_training_steps=2, lr=1e-3, save_freq=1)
    begin = AutoModelForCausalLM.from_pretrained(demo / "model").state_dict()
    for step, share in (1, 0.0), (2, 0.6):
        actor, ref = (stored(done.path / f"global_step_{step}" / part) for part in ("actor", "ref"))
        for name in begin:
            close(ref[f"model.{name}"], (1 - share) * begin[name] + share * actor[f"model.{name}"], rtol=1e-6, atol=1e-7)
    assert (actor["model.lm_head.weight"] - begin["lm_head.weight"]).abs().max() > 1e-4


def test_correction_weighs_and_masks(demo, tmp_path):
    """Engine and trainer agree here, so a threshold of 1/2 makes every weight 1/2, and bounds from 2 to 3 leave no token. The length penalty, too, is what it says."""
    found = []
    for name, changed in ("plain", {}), ("half", dict(rollout_is="token", rollout_is_threshold=0.5)), ("none", dict(rollout_rs="sequence", rollout_rs_threshold="2_3")):
        (tmp_path / name).mkdir()
        found += run(demo, tmp_path / name, total_training_steps=1, max_grad_norm=1e9, length_penalty=0.5, **changed).rows
    plain, half, none = found
    assert half["actor/grad_norm"] == pytest.approx(plain["actor/grad_norm"] / 2, rel=1e-4) and half["rollout/is_mean"] == 0.5
    assert none["actor/skipped_updates"] == 1 and none["rollout/rs_masked_frac"] == 1
    for row in found:
        assert row["critic/rewards/mean"] == pytest.approx(row["critic/score/mean"] - 0.5 * row["response_length/mean"] / 10)
        assert abs(row["rollout/kl"]) < 1e-5 and 0 <= row["rollout/k3_kl"] < 1e-9


def test_mismatch_is_seen(demo, tmp_path):
    """With top_p .7 the engine's probabilities are renormalised: above the trainer's, a KL of the engine to the trainer above 0."""
    row, = run(demo, tmp_path, total_training_steps=1, top_p=0.7, rollout_is="token").rows
    assert row["rollout/kl"] > 0.05 and 0.5 < row["rollout/is_mean"] < 0.95 and 0 < row["rollout/is_eff_sample_size"] < 1


def test_remax_compares_with_the_greedy_answer(process_group, demo, tmp_path):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(demo / "model").eval(), AutoTokenizer.from_pretrained(demo / "model")
    run(demo, tmp_path, adv_estimator="remax", loss="gpg", n=2, train_batch_size=8, total_training_steps=1, dump_rollouts=16)
    dumped = [json.loads(line) for line in (tmp_path / "runs/run/rollouts/step_1.jsonl").read_text().splitlines()]
    baselines = [d["score"] - d["advantage"] for d in dumped]
    for first, second, d in zip(baselines[::2], baselines[1::2], dumped[::2]):
        prompt = tokenizer(d["prompt"], return_tensors="pt", add_special_tokens=False).input_ids
        answer = tokenizer.decode(model.generate(prompt, do_sample=False, max_new_tokens=10)[0, prompt.shape[1]:], skip_special_tokens=True)
        assert first == second == float(answer.strip() == f"#### {d['ground_truth']}"), (answer, d)
    assert len(set(baselines)) == 2 and len(dumped) == 16


def test_without_a_varied_group_nothing_is_trained(process_group, demo, tmp_path):
    """All answers score 1: two batches are drawn, no update is made; the metrics stay finite."""
    (tmp_path / "reward.py").write_text("def reward(**item):\n    return 1.0\n")
    row, = run(demo, tmp_path, reward_fn=f"{tmp_path / 'reward.py'}:reward", filter_groups="true", max_num_gen_batches=2, ppo_mini_batch_size=2, total_training_steps=1).rows
    assert row["training/gen_batches"] == 2 and row["training/groups_used"] == 0 and row["training/groups_constant"] == 8
    assert row["actor/skipped_updates"] == 0 and "actor/grad_norm" not in row  # no update, and nothing wrong
    assert row["training/sampled_score_mean"] == 1 and all(math.isfinite(v) for v in row.values())


@pytest.mark.parametrize("name", ["dapo", "rloo", "reinforce_pp"] + [name for name in NAMES if SLOW and name not in ("dapo", "rloo", "reinforce_pp")])
def test_it_learns(demo, tmp_path, name):
    """32 sums x 8 answers, 10 steps; mean score of the first three and the last three steps (of all that was sampled): dapo .26 -> .48,
    rloo .24 -> .51, reinforce_pp .25 -> .53."""
    table = pq.read_table(demo / "train.parquet")
    pq.write_table(table.take(list(range(0, 352, 11))), tmp_path / "train.parquet")
    given = {"train_batch_size": 32} | algorithms(8, 10)[name]
    rows = run(demo, tmp_path, train_files=tmp_path / "train.parquet", ppo_mini_batch_size=8, n=8, total_training_steps=10, lr=3e-4, max_num_gen_batches=2, **given).rows
    scores = [r.get("training/sampled_score_mean", r["critic/score/mean"]) for r in rows]
    assert sum(scores[-3:]) / 3 > sum(scores[:3]) / 3 + 0.1, scores
