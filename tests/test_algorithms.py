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
import sys
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import grpo
from test_grpo import VECTORS, close, fork, tensor
from test_rollout import process_group  # noqa: F401

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
    given = case["inputs"]
    lengths = torch.tensor(given["valid_response_length"])
    penalty = grpo.overlong_penalty(lengths[rows], given["max_resp_len"], given["overlong_buffer_len"] if given["enable"] else 0, given["penalty_factor"])
    return {"overlong_penalty": torch.zeros(len(lengths), dtype=torch.float64).index_copy(0, torch.tensor(rows), penalty)}


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
            with pytest.raises(NotImplementedError):
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
