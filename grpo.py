"""Stage 4a: critic-free reinforcement learning of a language model (GRPO and its relatives), in one file.

GRPO (arXiv 2402.03300) is PPO (1707.06347) with these deletions: no critic, no GAE, no value loss. In their place each
prompt is answered n times and a response's advantage is its reward against its siblings', (R - mean) / std, the same for
all of its tokens. What is left of PPO: the clipped ratio. KL to a reference model is optional and off. The relatives are an `if` each
in group_advantages, token_advantages and policy_loss, two tables of the literature; README.md says which options make which paper.

One step:  prompts -> n responses each -> rewards -> (old, reference) log-probs -> advantages -> clipped update -> weights to the engine

    python grpo.py --train_files data/gsm8k/train.parquet --val_files data/gsm8k/test.parquet      one GPU, or a CPU
    torchrun --standalone --nproc_per_node=8 grpo.py --model_path Qwen/Qwen2.5-7B-Instruct ...     eight GPUs

Everything per token is 1-D: the response tokens of this rank's batch, one after the other. T packed tokens of a
micro-batch (prompts included), R response tokens, N responses, V vocabulary, H hidden.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import sys
import time
import types
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, GenerationConfig

from merge import dump_rollouts, find_checkpoint, load_checkpoint, make_logger, perf_metrics, stats, timer, try_save
from prepare_data import batch_rows, load_prompts, resolve_model
from reward import Scorer, method_for, summarize
from rollout import (Sampling, all_sum, build_engine, check_common, init_distributed, must_sleep, one_sentence, parse_args, print0, rejection_rules,
                     request_seeds, rollout_correction, score, stop_signals, validate, within_memory)


@dataclass
class Args:
    # data
    train_files: str = "data/gsm8k/train.parquet"        # parquet in verl's schema; several: a,b
    val_files: str = "data/gsm8k/test.parquet"           # likewise; "" for no validation
    train_batch_size: int = 256                          # prompts a step
    max_prompt_length: int = 512                         # tokens
    max_response_length: int = 256                       # tokens
    truncation: Literal["filter", "error", "left", "right", "middle"] = "filter"  # what to do with longer prompts
    prompt_key: str = "prompt"                           # column of the chat messages
    # model and optimizer
    model_path: str = "Qwen/Qwen2.5-0.5B-Instruct"       # local directory or hub name
    lr: float = 1e-6                                     # AdamW
    weight_decay: float = 0.01                           # AdamW
    warmup_steps: int = 0                                # steps of linear warm-up
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"  # after it; linear and cosine end at 0
    max_grad_norm: float = 1.0                           # clip the gradient's norm to this
    ppo_mini_batch_size: int = 64                        # prompts an optimizer step, over all GPUs
    ppo_epochs: int = 1                                  # passes over a batch
    max_tokens_per_micro_batch: int = 16384              # prompt + response tokens of one forward/backward on one GPU
    gradient_checkpointing: bool = False                 # recompute layers in the backward: less memory, slower
    param_offload: bool = False                          # parameters wait on the host while the engine generates
    optimizer_offload: bool = False                      # optimizer state likewise
    offload_policy: bool = False                         # FSDP2's: parameters, gradients and optimizer live on the host
    compile: Literal["auto", "true", "false"] = "auto"   # torch.compile of layers and head; auto: on a GPU
    dtype: Literal["auto", "bf16", "fp32"] = "auto"      # compute; master weights are fp32. auto: bf16 on a GPU
    # rollout
    engine: Literal["vllm", "hf"] = "vllm"               # hf: Hugging Face generate, for CPUs and debugging
    n: int = 8                                           # responses a prompt; torchrun takes --n for its own: there write --rollout_n
    temperature: float = 1.0                             # sampling; training divides logits by it too
    top_p: float = 1.0                                   # 1: off
    top_k: int = -1                                      # -1: off
    ignore_eos: bool = False                             # every response max_response_length long, for benchmarks
    gpu_memory_utilization: float = 0.4                  # share of the GPU for vLLM's weights and KV cache
    tensor_model_parallel_size: int = 1                  # GPUs that share one vLLM engine
    max_num_seqs: int = 1024                             # sequences an engine decodes at once
    engines_per_gpu: int = 1                             # vLLM engines that share a GPU's prompts: many short sequences keep one busy with Python
    sleep: Literal["auto", "always", "never"] = "auto"   # vLLM gives its memory back while training; auto: if both don't fit
    rollout_logprobs: float = 0.0625                     # share of responses whose engine log-probs are compared with the trainer's
    enforce_eager: bool = False                          # vLLM without CUDA graphs: starts faster, runs slower
    # algorithm
    adv_estimator: Literal["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo", "gpg", "grpo_passk"] = "grpo"  # advantage
    norm_adv_by_std_in_grpo: bool = True                 # false: no division by the group's std (Dr. GRPO)
    gamma: float = 1.0                                   # discount of reinforce_plus_plus
    loss: Literal["vanilla", "gspo", "cispo", "geo_mean", "sapo", "gpg", "clip_cov", "kl_cov"] = "vanilla"  # policy loss; vanilla: PPO's clip
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = "token-mean"  # token losses -> one
    clip_ratio_low: float = 0.2                          # ratio is clipped to [1 - low, 1 + high]; geo_mean: its log to [-low, high]
    clip_ratio_high: float = 0.2                         # 0.28 is DAPO's clip-higher
    clip_ratio_c: float = 3.0                            # vanilla's dual clip: bound of the loss at negative advantage; 0: off
    tau_pos: float = 1.0                                 # sapo: steepness of the gate at positive advantage
    tau_neg: float = 1.05                                # at negative advantage
    clip_cov_ratio: float = 0.0002                       # clip_cov: share of tokens that lose their gradient
    clip_cov_lb: float = 1.0                             # among those with a covariance above this
    clip_cov_ub: float = 5.0                             # and below this
    kl_cov_ratio: float = 0.0002                         # kl_cov: share of tokens that pay
    ppo_kl_coef: float = 0.1                             # this times |log-ratio|
    entropy_coeff: float = 0.0                           # entropy bonus
    use_kl_loss: bool = False                            # KL to the reference model (the initial one) in the loss
    kl_loss_coef: float = 0.001                          # its weight
    kl_loss_type: Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "low_var_kl+", "k3+"] = "low_var_kl"  # estimator; +: k2's gradient
    use_kl_in_reward: bool = False                       # KL to the reference model as a cost of each token
    kl_coef: float = 0.001                               # its weight
    kl_penalty: Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"] = "kl"  # estimator
    kl_ctrl: Literal["fixed", "adaptive"] = "fixed"      # adaptive: kl_coef moves until the KL is kl_target
    kl_target: float = 0.1                               # nats a token
    kl_horizon: int = 10000                              # responses; larger: slower
    ref_ema_steps: int = 0                               # every so many steps the reference moves towards the policy; 0: never
    ref_ema_alpha: float = 0.6                           # share of the policy in it then
    rollout_is: Literal["none", "token", "sequence"] = "none"  # truncated importance weights, trainer's probability over the engine's
    rollout_is_threshold: float = 2.0                    # their upper bound
    rollout_is_batch_normalize: bool = False             # divide them by their mean
    rollout_rs: str = "none"                             # leave out what that ratio is out of bounds for: token|sequence, or verl's seq_mean_k3, ...
    rollout_rs_threshold: str = "0.5_2.0"                # bounds of the ratio, lower_upper (or the upper bound of k2, k3)
    filter_groups: bool = False                          # dynamic sampling: prompts with equal scores make room for further ones
    max_num_gen_batches: int = 10                        # after so many batches train on what is there; 0: no limit
    overlong_buffer_len: int = 0                         # tokens before max_response_length in which the reward falls; 0: off
    overlong_penalty_factor: float = 1.0                 # by so much
    mask_truncated: bool = False                         # responses cut at max_response_length are not trained on
    length_penalty: float = 0.0                          # reward lost by a response of max_response_length, shorter ones in proportion
    # reward
    reward_fn: str = "auto"                              # auto|robust|strict|flexible|boxed|verl_strict|math or path.py:function
    reward_timeout: float = 10.0                         # seconds an item may take
    reward_workers: int = 0                              # child processes a rank; 0: from the number of cores
    # trainer
    total_epochs: int = 15                               # passes over the training prompts
    total_training_steps: int = 0                        # stop after this many steps instead
    test_freq: int = 10                                  # validate every so many steps and at the end; 0: never
    val_before_train: bool = True                        # validate before the first step
    val_n: int = 1                                       # responses a validation prompt; pass@k for n > 1
    val_temperature: float = 0.0                         # 0: greedy
    save_freq: int = 10                                  # checkpoint every so many steps and at the end; 0: never
    max_skipped_steps: int = 5                           # stop after so many steps in a row with an update that had to be skipped; 0: never
    max_ckpt_to_keep: int = 0                            # older checkpoints are deleted; 0: keep all
    resume_mode: str = "auto"                            # auto: newest whole checkpoint of the run; disable; or a path
    project_name: str = "nanoverl"                       # folder of runs, and wandb's project
    experiment_name: str = "grpo"                        # folder of this run
    default_local_dir: str = "checkpoints"               # root of both
    logger: str = "console,jsonl,tensorboard"            # any of console,jsonl,tensorboard,wandb
    dump_rollouts: int = 8                               # responses a step written to rollouts/step_N.jsonl
    seed: int = 0                                        # of data order and sampling


def check(args, world):
    """Raise ValueError, in a sentence that names the option and the remedy, before anything expensive starts."""
    check_common(args, world, (
        (0, math.inf, "overlong_buffer_len"), (0, 1, "clip_cov_ratio kl_cov_ratio"), (1e-9, math.inf, "tau_pos tau_neg rollout_is_threshold")), bad=(
        (args.n == 1 and (args.filter_groups or args.adv_estimator not in ("reinforce_plus_plus", "remax")), "--n 1 leaves a group of one, whose advantage is 0: nothing would be "
         "learned; take --n 2 or more, --adv_estimator reinforce_plus_plus or remax (and no --filter_groups), or ppo.py"),
        (args.overlong_buffer_len > args.max_response_length, f"--overlong_buffer_len {args.overlong_buffer_len} is beyond --max_response_length {args.max_response_length}"),
        (args.ignore_eos and args.mask_truncated, "--ignore_eos true cuts every response, and --mask_truncated true leaves those out: nothing would be trained on")), odd=(
        (args.loss in ("gspo", "geo_mean", "sapo") and args.loss_agg_mode != "seq-mean-token-mean", f"--loss {args.loss} is meant for --loss_agg_mode seq-mean-token-mean"),))
    rejection_rules(args)
    if args.rollout_is != "none" or args.rollout_rs != "none":
        args.rollout_logprobs = 1.0  # the correction needs those of every response


# ---------------------------------------------------------------------------------------------------------------------
# Model: a packed row of sequences in, log-probs of the response tokens out

def packed_attention(module, query, key, value, attention_mask, scaling=None, sliding_window=None, cu_seq_lens_q=None, max_length_q=None, **kwargs):
    """Causal attention inside each sequence of a packed row: query (1, heads, T, D), cu_seq_lens_q (sequences + 1,) int32."""
    window = (sliding_window - 1 if sliding_window and sliding_window < max_length_q else -1, 0)
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))                                         # (T, heads, D)
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        return varlen_attn(q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, scale=scaling, window_size=window).unsqueeze(0), None
    position = torch.arange(max_length_q, device=query.device)
    valid = position < cu_seq_lens_q.diff()[:, None]                                                          # (sequences, L)
    def pad(x):  # (1, heads, T, D) -> (sequences, heads, L, D); under causal attention right padding needs no mask
        return x.new_zeros(*valid.shape, x.shape[1], x.shape[3]).masked_scatter(valid[:, :, None, None], x[0].transpose(0, 1)).transpose(1, 2)
    near = None if window[0] < 0 else (position[:, None] - position).unsqueeze(0).ge(0) & ((position[:, None] - position) <= window[0])
    out = F.scaled_dot_product_attention(pad(query), pad(key), pad(value), attn_mask=near, is_causal=near is None, scale=scaling,
                                         enable_gqa=query.shape[1] != key.shape[1])
    return out.transpose(1, 2)[valid].unsqueeze(0), None                                                      # (1, T, heads, D)


AttentionInterface.register("packed", packed_attention)
AttentionMaskInterface.register("packed", lambda *args, **kwargs: None)


def head_logprobs(hidden, weight, bias, labels, temperature, entropy_grad):
    """hidden (R, H), weight (V, H), labels (R,) -> log-probs (R,) and entropies (R,), at least fp32."""
    logits = F.linear(hidden, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    logp = logits.gather(-1, labels[:, None])[:, 0] - logits.logsumexp(-1)
    z = logits if entropy_grad else logits.detach()
    p = z.softmax(-1)
    return logp, z.logsumexp(-1) - (p * torch.where(p > 0, z, 0.0)).sum(-1)  # where: a logit of -inf has no part in the entropy or its gradient


HEAD_CHUNK = 8192  # tokens whose logits exist at once; the backward recomputes them


def token_logprobs(self, inputs, labels, temperature, entropy_grad=False):
    """A method of the model: pack()'s inputs and labels -> log-probs (R,), entropies (R,) at that temperature."""
    index, inputs = inputs["index"], {k: v for k, v in inputs.items() if k != "index"}
    hidden = self.base_model(**inputs, use_cache=False).last_hidden_state[0][index]                          # (R, H)
    head = self.get_output_embeddings()
    parts = [checkpoint(self.head_logprobs, h, head.weight, head.bias, y, temperature, entropy_grad, use_reentrant=False)
             for h, y in zip(hidden.split(HEAD_CHUNK), labels.split(HEAD_CHUNK))]
    return tuple(torch.cat(x) for x in zip(*parts))


def load_model(path, args, device, train=True):
    """A causal LM with fp32 master weights, sharded by FSDP2, with the method token_logprobs."""
    bf16 = args.dtype == "bf16"
    fp32 = train or not bf16 or args.ref_ema_steps  # bf16 would round a moving average's small steps away
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32 if fp32 else torch.bfloat16, attn_implementation="packed")
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # dropout would make the ratio differ from 1 before the first update
    model.token_logprobs = types.MethodType(token_logprobs, model)
    model.head_logprobs = head_logprobs
    check_forward(model)
    model.train(train).requires_grad_(train)
    if train and args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layers = model.base_model.layers
    if args.compile == "true":
        model.head_logprobs = torch.compile(head_logprobs, dynamic=True)
        for layer in layers:
            layer.compile(dynamic=True)
    policy = dict(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32),
                  offload_policy=CPUOffloadPolicy() if args.offload_policy else OffloadPolicy())
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh, **policy)
    fully_shard(model, mesh=mesh, **policy)  # embedding, last norm and head (perhaps the embedding once more) in one unit
    register_fsdp_forward_method(model, "token_logprobs")
    if not args.offload_policy:
        model.to(device)
    return model


@torch.no_grad()
def check_forward(model):
    """Packed log-probs of two short sequences must equal the model's own forward, or its architecture isn't the plain one
    assumed above (logits scaled or soft-capped, attention with extras) and training would be silently wrong."""
    ids = torch.arange(1, 12) % model.config.vocab_size
    inputs = {"input_ids": ids[None], "position_ids": torch.tensor([[*range(4), *range(7)]]), "max_length_q": 7,
              "cu_seq_lens_q": torch.tensor([0, 4, 11], dtype=torch.int32), "index": torch.tensor([0, 1, 2, 4, 5, 6, 7, 8, 9])}
    packed = model.token_logprobs(inputs, ids[inputs["index"] + 1], 1.0)[0]
    model.set_attn_implementation("sdpa")
    alone = [model(input_ids=s[None], use_cache=False).logits[0, :-1].float().log_softmax(-1).gather(-1, s[1:, None])[:, 0] for s in (ids[:4], ids[4:])]
    model.set_attn_implementation("packed")
    if (error := (packed - torch.cat(alone)).abs().max()) > (1e-3 if packed.dtype == model.dtype else 0.1):
        raise ValueError(f"--model_path: packed log-probs of {type(model).__name__} differ from its own forward by {error:.3g}; this architecture is "
                         "not supported (are its logits scaled or soft-capped?)")


def move(model, optimizer, args, device):
    """Idle offload: parameters and optimizer state to the host ("cpu") for the rollout, or back."""
    if args.param_offload:
        model.to(device)
    if args.optimizer_offload:
        for state in optimizer.state.values():
            state |= {k: v.to(device) for k, v in state.items() if torch.is_tensor(v) and v.dim() > 0}


@torch.no_grad()
def ema_update(ref, model, alpha):
    """ref <- (1 - alpha) ref + alpha policy (TR-DPO, 2404.09656), each rank its shard."""
    for module in (ref, model):
        if hasattr(module, "reshard"):
            module.reshard()  # after a forward without gradient FSDP2 leaves the root's parameters unsharded
    for r, p in zip(ref.parameters(), model.parameters(), strict=True):
        r.lerp_(p.detach(), alpha)


def pack(samples, device):
    """Lay samples end to end, prompt and response -> model inputs, labels.

    inputs: input_ids, position_ids (1, T); cu_seq_lens_q (N + 1,); max_length_q; index (R,): the place in the row, one before a response
    token, whose logits predict it. labels (R,): the response tokens, sample after sample.
    """
    lengths = [len(s.prompt_ids) + len(s.response_ids) for s in samples]
    starts = np.cumsum([0, *lengths])
    ids = np.fromiter(itertools.chain.from_iterable(itertools.chain(s.prompt_ids, s.response_ids) for s in samples), np.int64, starts[-1])
    index = np.concatenate([np.arange(end - len(s.response_ids), end) for s, end in zip(samples, starts[1:])])
    position = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    ids, index, position, cu = (torch.from_numpy(x).to(device, non_blocking=True) for x in (ids, index, position, starts.astype(np.int32)))
    return {"input_ids": ids[None], "position_ids": position[None], "cu_seq_lens_q": cu, "max_length_q": max(lengths), "index": index - 1}, ids[index]


def micro_batches(samples, rows, budget):
    """Split rows (indices into samples) into lists of at most `budget` tokens; every rank gets the same number of lists.

    Neighbours have similar lengths. A rank with fewer gets empty lists, for which it runs a sample at weight zero.
    """
    size = lambda i: len(samples[i].prompt_ids) + len(samples[i].response_ids)
    batches, used = [], budget + 1
    for i in sorted(rows, key=size, reverse=True):
        if used + size(i) > budget:
            batches.append([])
            used = 0
        batches[-1].append(i)
        used += size(i)
    count = torch.tensor(len(batches))
    dist.all_reduce(count, op=dist.ReduceOp.MAX)
    return batches + [[]] * (int(count) - len(batches))


def flat_rows(offsets, rows):
    """Places of these samples' response tokens in the batch's flat tensors. offsets (N + 1,): where each sample starts."""
    return torch.cat([torch.arange(offsets[i], offsets[i + 1]) for i in rows])


@torch.no_grad()
def batch_logprobs(model, samples, offsets, args, device, rows=None):
    """Log-probs (R,) under `model` of the response tokens of this rank's batch, or of some of its rows."""
    logp = torch.zeros(offsets[-1], device=device)
    for rows in micro_batches(samples, range(len(samples)) if rows is None else rows, 2 * args.max_tokens_per_micro_batch):
        inputs, labels = pack([samples[i] for i in rows or [0]], device)
        out, _ = model.token_logprobs(inputs, labels, args.temperature)
        if rows:
            logp[flat_rows(offsets, rows).to(device)] = out
    return logp


# ---------------------------------------------------------------------------------------------------------------------
# Rewards and advantages: float64 on the CPU. N responses, their R tokens one after the other, group (N,) int numbers the prompts.

def sum_by(index, values, size):
    """Sums (size,) of the values that share an index."""
    return torch.zeros(size, dtype=values.dtype, device=values.device).index_add(0, index, values)


def shaped_rewards(args, scores, samples):
    """Score of each response (N,) less what its length costs: --length_penalty, and DAPO's (2503.14476, eq. 13) from 0 where the overlong buffer begins
    linearly to --overlong_penalty_factor at --max_response_length. NaN: a score that could not be had."""
    lengths = torch.tensor([len(s.response_ids) for s in samples], dtype=torch.float64)
    rewards = torch.tensor([s.score for s in scores], dtype=torch.float64) - args.length_penalty * lengths / args.max_response_length
    if args.overlong_buffer_len:
        rewards -= args.overlong_penalty_factor * ((lengths - args.max_response_length) / args.overlong_buffer_len + 1).clamp(0, 1)
    return rewards


def group_max(values, group):
    """Largest value (G,) of each group; NaN has no part."""
    start = torch.full((int(group.max()) + 1,), -math.inf, dtype=torch.float64)
    return start.scatter_reduce(0, group, values.double().masked_fill(values.isnan(), -math.inf), "amax")


def varied_groups(rewards, group):
    """Which prompts (G,) got unequal rewards; NaN: missing. By max and min, because the rounding of equal rewards' mean and std isn't 0."""
    return group_max(rewards, group) + group_max(-rewards, group) > 1e-6


def fill_batch(draw, size, limit):
    """Dynamic sampling (DAPO): draw(0), draw(1), ... until `size` groups have unequal scores, or `limit` times (0: no limit).

    draw returns groups: lists of responses, tuples that end with the Score. Returns `size` groups, the varied ones first in the order
    they were drawn, filled up with constant ones; how many are varied; metrics.
    """
    varied, constant, rounds = [], [], 0
    while len(varied) < size and (rounds < limit or limit <= 0):
        for group in draw(rounds):
            scores = torch.tensor([response[-1].score for response in group])
            (varied if varied_groups(scores, torch.zeros(len(group), dtype=torch.long)) else constant).append(group)
        rounds += 1
    scores, used = torch.tensor([response[-1].score for group in varied + constant for response in group]), min(len(varied), size)
    return (varied + constant)[:size], used, {"training/gen_batches": rounds, "training/groups_used": used, "training/groups_constant": len(constant),
                                              "training/groups_surplus": len(varied) - used, "training/sampled_score_mean": scores.nan_to_num(0.0).mean().item()}


def kl_in_reward(token_rewards, old_logp, ref_logp, row, size, kind, coef):
    """Rewards of tokens less coef * KL (R,); the KL that the controller sees, as in verl a mean over all ranks' rows of their token means; their number."""
    kl = kl_penalty(old_logp, ref_logp, kind)
    total, rows = all_sum((sum_by(row, kl, size) / sum_by(row, torch.ones_like(kl), size).clamp(min=1)).sum(), size)
    return token_rewards - coef * kl, total / rows, rows


def next_kl_coef(args, coef, kl, rows):
    """--kl_ctrl adaptive (1909.08593): after `rows` responses whose KL was `kl`, a proportional step towards --kl_target."""
    return coef if args.kl_ctrl == "fixed" else coef * (1 + min(max(kl / args.kl_target - 1, -0.2), 0.2) * rows / args.kl_horizon)


def returns_to_go(token_rewards, lengths, gamma):
    """Discounted sum of a response's rewards from each of its tokens on.  (R,), (N,) -> (R,)"""
    backwards = lambda rewards: list(itertools.accumulate(reversed(rewards), lambda later, reward: reward + gamma * later))
    return torch.tensor([x for rewards in token_rewards.split(lengths.tolist()) for x in reversed(backwards(rewards.tolist()))], dtype=torch.float64)


def whiten(values, mask):
    """Mean 0 and (sample) variance 1 over the unmasked tokens of all ranks; 0 where masked, and for fewer than two or equal values.  (R,) -> (R,)"""
    count, total = all_sum(mask.sum(), torch.where(mask, values, 0.0).sum())
    centred = torch.where(mask, values - total / max(count, 1), 0.0)
    variance = all_sum(centred.square().sum())[0] / max(count - 1, 1)
    return centred * (variance + 1e-8) ** -0.5 * (variance > 1e-12)


def group_advantages(kind, rewards, group, lengths=None, norm_by_std=True):
    """A response's reward against those of its siblings, by --adv_estimator.  (N,) -> (N,)

    rewards: NaN is a missing reward: its advantage is 0 and the others do without it. group: rows with the same number answer the
    same prompt, in any order, all on one rank. lengths (N,): tokens, for opo. A group whose rewards are all equal, or of one, is exactly 0.
    """
    rewards, present = rewards.double(), ~rewards.isnan()
    varied = varied_groups(rewards, group)
    total = lambda values: sum_by(group, torch.where(present, values, 0.0), len(varied))[group]  # over the group, at each of its rows
    count = total(present.double()).clamp(min=1)
    centred = rewards - total(rewards) / count
    scale = (total(centred.square()) / (count - 1).clamp(min=1)).sqrt() + 1e-6 if norm_by_std else 1.0
    if kind == "grpo":                            # 2402.03300: sample std. Without it Dr. GRPO, 2503.20783
        result = centred / scale
    elif kind == "rloo":                          # 2402.14740: the mean of the others as baseline
        result = centred * count / (count - 1).clamp(min=1)
    elif kind == "reinforce_plus_plus_baseline":  # 2501.03262: whitened over all tokens afterwards
        result = centred
    elif kind == "opo":                           # 2505.23585: the group's mean, weighted by length
        result = rewards - total(rewards * lengths) / total(lengths.double()).clamp(min=1)
    elif kind == "gpg":                           # 2504.02546, F = 1: larger by the share of constant groups (verl counts scores of 0)
        everyone, useful = all_sum(present.sum(), (present & varied[group]).sum())
        result = centred * everyone / max(useful, 1)
    elif kind == "grpo_passk":                    # 2503.19595: the best alone, by its lead over the second
        best = rewards == group_max(rewards, group)[group]
        lead = rewards - group_max(torch.where(best, math.nan, rewards), group)[group]
        result = torch.where(best & (total(best.double()) == 1), lead / scale, 0.0)
    return torch.where(present & varied[group], result, 0.0)


def token_advantages(args, rewards, token_rewards, lengths, group, mask, baselines=None):
    """Advantage of every response token, by --adv_estimator.

    rewards (N,): given at the end of a response; NaN is missing. token_rewards (R,): given on the way (KL). mask (R,): tokens trained on;
    the others get 0. baselines (N,): rewards of the greedy answers, for remax. -> (R,)
    """
    row = torch.arange(len(lengths)).repeat_interleave(lengths)
    if args.adv_estimator in ("reinforce_plus_plus", "remax"):
        ends = (lengths.cumsum(0) - 1)[lengths > 0]
        returns = returns_to_go(token_rewards.index_add(0, ends, rewards[lengths > 0]), lengths, args.gamma)
        result = whiten(returns, mask) if args.adv_estimator == "reinforce_plus_plus" else returns - baselines[row]  # 2501.03262, 2310.10505
    else:
        result = group_advantages(args.adv_estimator, rewards + sum_by(row, token_rewards, len(lengths)), group, lengths, args.norm_adv_by_std_in_grpo)[row]
        result = whiten(result, mask) if args.adv_estimator == "reinforce_plus_plus_baseline" else result
    return torch.where(mask, result, 0.0)


# ---------------------------------------------------------------------------------------------------------------------
# Losses: 1-D over the R response tokens of a micro-batch

def loss_weights(lengths, mode, tokens, rows, max_length):
    """Weight (N,) of each response's token losses so that their plain sum over all micro-batches and ranks is the aggregated loss.

    lengths (N,): trained tokens a response. tokens, rows: trained tokens, and responses that have any, in the mini-batch of all ranks.
    """
    divisor = {"token-mean": tokens,                                   # DAPO, 2503.14476
               "seq-mean-token-sum": rows,
               "seq-mean-token-mean": rows * lengths.clamp(min=1),     # GRPO, 2402.03300
               "seq-mean-token-sum-norm": rows * max_length}[mode]     # Dr. GRPO, 2503.20783, with max_length for its constant
    return 1 / torch.as_tensor(divisor, dtype=torch.float64).clamp(min=1).expand(len(lengths))


def row_mean(values, row, mask):
    """Mean over the unmasked tokens of each row, at all of its tokens. row (R,): number of each token's response.  (R,) -> (R,)"""
    size = int(row.max()) + 1 if len(row) else 0
    return (sum_by(row, torch.where(mask, values, 0.0), size) / sum_by(row, mask.to(values.dtype), size).clamp(min=1))[row]


def covariant_tokens(args, logp, old_logp, advantages, mask, luck):
    """Tokens (R,) whose covariance of advantage and log-prob Clip-Cov and KL-Cov (2505.22617) act on, chosen over the mini-batch of all ranks.

    logp: under the weights of now. mask: this rank's trained tokens of the mini-batch. Clip-Cov: a random clip_cov_ratio of all tokens among
    the unclipped ones with a covariance between clip_cov_lb and clip_cov_ub, in the order of luck (R,); KL-Cov: the kl_cov_ratio with
    the highest. At least one, and all that share the last place. verl chooses inside each micro-batch.
    """
    logp, old_logp, advantages = (torch.where(mask, x.double().cpu(), 0.0) for x in (logp, old_logp, advantages))
    tokens, sum_logp, sum_advantages = all_sum(mask.sum(), logp.sum(), advantages.sum())
    covariance = (advantages - sum_advantages / tokens) * (logp - sum_logp / tokens)
    if args.loss == "clip_cov":
        ratio, share = (logp - old_logp).exp(), args.clip_cov_ratio
        unclipped = advantages * ratio.clamp(1 - args.clip_ratio_low, 1 + args.clip_ratio_high) >= advantages * ratio
        mask = mask & unclipped & (covariance > args.clip_cov_lb) & (covariance < args.clip_cov_ub)
        rank_by = luck
    else:
        rank_by, share = covariance, args.kl_cov_ratio
    count, everyone = max(1, int(share * tokens)), [None] * dist.get_world_size()
    dist.all_gather_object(everyone, sorted(rank_by[mask].tolist(), reverse=True)[:count])
    best = sorted(itertools.chain(*everyone), reverse=True)[:count]
    return mask & (rank_by >= best[-1]) if best else torch.zeros_like(mask)


def policy_loss(args, logp, old_logp, advantages, row, mask, chosen=None, weights=None):
    """The loss of each token, by --loss: a table of the literature. All (R,) -> loss (R,) and per-token metrics (R,).

    row: number of each token's response; mask: trained tokens (a sequence's ratio is made of them); chosen: covariant_tokens();
    weights: rollout_correction()'s. The log-ratio is clamped to +-20 as in verl, with no gradient outside.
    """
    low, high, log_ratio = args.clip_ratio_low, args.clip_ratio_high, logp - old_logp
    metrics, ratio = {"ppo_kl": -log_ratio.detach()}, log_ratio.clamp(-20, 20).exp()
    if args.loss == "gspo":           # 2507.18071: the ratio of the sequence, in its token form
        ratio = (logp - logp.detach() + row_mean(log_ratio, row, mask).detach()).clamp(max=10).exp()
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
    if args.loss in ("vanilla", "gspo", "clip_cov"):  # PPO, 1707.06347; bounds of their own: DAPO, 2503.14476
        loss = torch.maximum(plain, clipped)
        metrics["pg_clipfrac"] = clipped > plain
    if args.loss == "vanilla" and args.clip_ratio_c:  # dual clip, 1912.09729
        metrics["pg_clipfrac_lower"] = (loss > -args.clip_ratio_c * advantages) & (advantages < 0)
        loss = torch.where(advantages < 0, torch.minimum(loss, -args.clip_ratio_c * advantages), loss)
    elif args.loss == "clip_cov":     # 2505.22617: no gradient through the chosen tokens
        loss = torch.where(chosen, 0.0, loss)
        metrics["pg_clipfrac"] = chosen
    elif args.loss == "kl_cov":       # 2505.22617: the chosen tokens are held back, nothing is clipped
        loss = plain + torch.where(chosen, args.ppo_kl_coef * log_ratio.abs(), 0.0)
    elif args.loss == "cispo":        # 2506.13585: REINFORCE weighted by the clipped ratio; its value means nothing
        loss = -ratio.clamp(1 - low, 1 + high).detach() * advantages * logp
        metrics["pg_clipfrac"] = (ratio < 1 - low) | (ratio > 1 + high)
    elif args.loss == "sapo":         # 2511.20347: a soft gate of slope 1 at ratio 1
        tau = torch.where(advantages > 0, args.tau_pos, args.tau_neg)
        loss = -advantages * torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    elif args.loss == "geo_mean":     # 2507.20673: geometric mean of the sequence's ratios; bounds are of the log-ratio
        bounded = torch.where(advantages > 0, log_ratio.clamp(max=high), log_ratio.clamp(min=-low))
        loss = -row_mean(advantages, row, mask) * row_mean(bounded, row, mask).exp()
        outside = (log_ratio < -low) | (log_ratio > high)
        metrics |= {"pg_clipfrac": outside & (advantages > 0), "pg_clipfrac_lower": outside & (advantages < 0)}
        weights = weights if weights is None else row_mean(weights.clamp(min=1e-10).log(), row, mask).exp()
    elif args.loss == "gpg":          # 2504.02546 and plain REINFORCE: no ratio at all
        loss = -advantages * logp
    return (loss if weights is None else loss * weights), metrics


def kl_penalty(logp, ref_logp, kind):
    """Estimates of KL(policy || reference) per token (http://joschu.net/blog/kl-approx.html): (R,), (R,) -> (R,).

    k1|kl, abs, k2|mse, k3|low_var_kl; a trailing + keeps the value and takes k2's gradient, the unbiased one when used as a
    loss. As in verl k3's log-ratio is clamped to +-20 and its value to +-10.
    """
    d = logp - ref_logp
    c = d.clamp(-20, 20)
    kl = {"k1": d, "kl": d, "abs": d.abs(), "k2": d.square() / 2, "mse": d.square() / 2}
    kl["k3"] = kl["low_var_kl"] = ((-c).exp() - 1 + c).clamp(-10, 10)
    if kind.endswith("+"):
        return kl["k2"] - kl["k2"].detach() + kl[kind[:-1]].detach()
    return kl[kind]


# ---------------------------------------------------------------------------------------------------------------------
# Around the loop

def learning_rate(args, step, total_steps):
    """Of a step counted from 1: linear warm-up, then --lr_scheduler_type down to 0 one step after the last."""
    done = max(0.0, (step - 1 - args.warmup_steps) / max(1, total_steps - args.warmup_steps))
    decay = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[args.lr_scheduler_type]
    return args.lr * min(1.0, step / max(1, args.warmup_steps)) * decay


def setup(args):
    """All that can fail on bad input, before anything expensive: processes, options, model directory, data, reward function."""
    rank, world, device = init_distributed()
    args.dtype = {"auto": "bf16" if device.type == "cuda" else "fp32"}.get(args.dtype, args.dtype)
    args.compile = {"auto": "true" if device.type == "cuda" else "false"}.get(args.compile, args.compile)
    check(args, world)
    if args.offload_policy and device.type == "cpu":
        raise ValueError("--offload_policy true needs a GPU to offload from; leave it out")
    path, config, tokenizer = resolve_model(args.model_path)
    if (longest := getattr(config, "max_position_embeddings", None)) and args.max_prompt_length + args.max_response_length > longest:
        raise ValueError(f"--max_prompt_length {args.max_prompt_length} + --max_response_length {args.max_response_length} is beyond the {longest} "
                         f"positions of {args.model_path}; lower one of them")
    read = lambda files, rows: load_prompts(files.split(","), tokenizer, args.max_prompt_length, prompt_key=args.prompt_key,
                                            truncation=args.truncation, min_rows=rows) if files else []
    train, val = read(args.train_files, args.train_batch_size), read(args.val_files, 1)
    if args.reward_fn == "auto":
        for source in {row["data_source"] for row in train + val}:
            method_for(source)  # raises for one that has no rule
    cores = (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])
    scorer = Scorer(args.reward_fn, workers=args.reward_workers or max(1, min(8, cores - 1)), timeout=args.reward_timeout)
    run_dir = Path(args.default_local_dir) / args.project_name / args.experiment_name
    resume_from = find_checkpoint(run_dir, args.resume_mode)
    return rank, world, device, path, config, tokenizer, train, val, scorer, run_dir, resume_from


@record  # torchrun ends with the traceback of the rank that failed first
def main():
    args = parse_args(Args)
    with one_sentence():
        rank, world, device, path, config, tokenizer, train, val, scorer, run_dir, resume_from = setup(args)

    # -----------------------------------------------------------------------------------------------------------------
    # Engine, models, optimizer, resume
    run_dir.mkdir(parents=True, exist_ok=True)
    generation_config = None
    with contextlib.suppress(OSError):
        generation_config = GenerationConfig.from_pretrained(path)
    if args.sleep == "auto":
        args.sleep = "always" if device.type == "cuda" and must_sleep(args, config, world) else "never"
    with one_sentence():
        engine = build_engine(args, path, tokenizer, generation_config, device)
        engine.sleep()
        model = load_model(path, args, device)
        ref = load_model(path, args, device, train=False) if args.use_kl_loss or args.use_kl_in_reward else None
    parameters = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay, betas=(0.9, 0.999), fused=device.type == "cuda" and not args.offload_policy)
    saved = {"actor": (model, optimizer)} | ({"ref": (ref, None)} if ref is not None and args.ref_ema_steps else {})
    with one_sentence():
        state = load_checkpoint(resume_from, saved) if resume_from else {"step": 0}
    start_step, position = state["step"], state.get("position", state["step"])  # steps made, batches of the data order drawn
    kl_coef = state.get("kl_coef", args.kl_coef) if args.kl_ctrl == "adaptive" else args.kl_coef
    steps_per_epoch = len(train) // args.train_batch_size
    total_steps = args.total_training_steps or args.total_epochs * steps_per_epoch
    sampling = Sampling(temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, max_tokens=args.max_response_length, ignore_eos=args.ignore_eos)
    if rank == 0:
        (run_dir / "args.json").write_text(json.dumps(dataclasses.asdict(args), indent=1))
    log = make_logger(args, run_dir, start_step) if rank == 0 else lambda step, metrics: None
    print0(f"{type(model).__name__} of {parameters / 1e6:.1f}M parameters on {world} x {torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}, {args.dtype} compute, fp32 masters; "
           f"engine {args.engine}, sleep {args.sleep}; sampling {sampling}; {total_steps} steps, {steps_per_epoch} an epoch"
           + (f"; resumed from {resume_from}" if resume_from else ""))

    def sync():
        move(model, optimizer, args, device)
        engine.update_weights(model)
        move(model, optimizer, args, "cpu")

    # This rank's places in a batch: a share of every mini-batch, so that an optimizer step sees the same prompts on any number of ranks.
    places = np.arange(args.train_batch_size).reshape(-1, world, args.ppo_mini_batch_size // world)[:, rank].flatten()

    def rollout(position):
        """Batch `position` of the data order: this rank's prompts answered n times and scored -> groups of (row, seed, sample, text, Score)."""
        rows = batch_rows(len(train), args.train_batch_size, args.seed, position)[places].repeat(args.n)
        seeds = np.reshape(request_seeds(args.seed, position + 1, args.train_batch_size * args.n), (-1, args.n))[places].flatten()
        with timer(timing, "gen"):
            samples = engine.generate([train[i]["prompt_ids"] for i in rows], sampling, seeds.tolist())
        with timer(timing, "reward"):
            texts, scores = score(scorer, tokenizer, samples, [train[i] for i in rows])
        responses = list(zip(rows.tolist(), seeds.tolist(), samples, texts, scores))
        groups = [responses[i:i + args.n] for i in range(0, len(responses), args.n)]
        if not args.filter_groups:
            return groups
        everyone = [None] * world  # dynamic sampling picks among the groups of all ranks, in the order of the batch
        dist.all_gather_object(everyone, list(zip(places.tolist(), groups)))
        return [group for _, group in sorted(itertools.chain(*everyone), key=lambda placed: placed[0])]

    if start_step >= total_steps:
        print0(f"nothing to do: {resume_from} has all {total_steps} steps; raise --total_training_steps, or take another --experiment_name")
    sync()
    if args.val_before_train and start_step == 0 and val:
        log(0, validate(engine, scorer, tokenizer, val, args, rank, world))

    # -----------------------------------------------------------------------------------------------------------------
    # Training
    mini_rows = args.ppo_mini_batch_size // world * args.n
    corrects = args.rollout_is != "none" or args.rollout_rs != "none"
    # With one update a batch, old log-probs are those of the update's own forward, unless something before it needs them.
    one_forward = args.train_batch_size == args.ppo_mini_batch_size and args.ppo_epochs == 1 and not (args.use_kl_in_reward or corrects or args.loss.endswith("_cov"))
    stop_signal, stopping, unsaved, skipped_steps = stop_signals(), 0, None, state.get("skipped_steps", 0)
    for step in tqdm(range(start_step + 1, total_steps + 1), initial=start_step, total=total_steps, desc="steps", disable=rank != 0, file=sys.stderr):
        timing, started, lr = defaultdict(float), time.perf_counter(), learning_rate(args, step, total_steps)

        # 1. Prompts -> n responses each -> scores. Rows of one prompt stand together and on one rank.
        metrics, filler = {}, torch.zeros(len(places), dtype=torch.bool)
        if args.filter_groups:
            groups, used, metrics = fill_batch(lambda k: rollout(position + k), args.train_batch_size, args.max_num_gen_batches)
            groups, filler = [groups[p] for p in places], torch.from_numpy(places >= used)  # constant groups that fill the batch up
        else:
            groups = rollout(position)
        position += metrics.get("training/gen_batches", 1)
        rows, seeds, samples, texts, scores = zip(*itertools.chain(*groups))
        if args.adv_estimator == "remax":  # one greedy answer a prompt is its baseline
            prompts = [train[i] for i in rows[::args.n]]
            with timer(timing, "gen"):
                greedy = engine.generate([p["prompt_ids"] for p in prompts], dataclasses.replace(sampling, temperature=0.0), list(seeds[::args.n]))
            with timer(timing, "reward"):
                greedy_scores = score(scorer, tokenizer, greedy, prompts)[1]
        engine.sleep()
        if args.sleep == "always" and device.type == "cuda":
            metrics["perf/memory_asleep_gb"] = np.subtract(*torch.cuda.mem_get_info()[::-1]) / 2**30

        # 2. Rewards, one a response. One that could not be had is NaN: that response is left out of everything.
        lengths = torch.tensor([len(s.response_ids) for s in samples])                                          # (N,)
        offsets = [0, *lengths.cumsum(0).tolist()]                                                              # sample i: flat[offsets[i]:offsets[i + 1]]
        row = torch.arange(len(samples)).repeat_interleave(lengths)                                             # (R,)
        group = torch.arange(len(groups)).repeat_interleave(args.n)                                             # (N,)
        rewards, baselines = shaped_rewards(args, scores, samples), None                                        # (N,)
        if args.adv_estimator == "remax":
            baselines = shaped_rewards(args, greedy_scores, greedy)[group]                                      # (N,)
            rewards = torch.where(baselines.isnan(), math.nan, rewards)
        rewards[filler[group]] = math.nan
        present, finished = ~rewards.isnan(), torch.tensor([s.finish_reason == "stop" for s in samples])        # (N,), (N,)
        mask = (present & finished if args.mask_truncated else present)[row]                                    # (R,) tokens with a loss

        # 3. Log-probs before the update: of the policy, of the reference, and the engine's own (NaN where it gave none).
        move(model, optimizer, args, device)
        with timer(timing, "old_log_prob"):
            old_logp = torch.zeros(offsets[-1], device=device) if one_forward else batch_logprobs(model, samples, offsets, args, device)  # (R,)
        if ref is not None:
            with timer(timing, "ref"):
                ref_logp = batch_logprobs(ref, samples, offsets, args, device)                                  # (R,)
        engine_logp = torch.tensor([x for s in samples for x in s.logp or [math.nan] * len(s.response_ids)], dtype=torch.float64)  # (R,)

        # 4. KL in the reward, correction of the engine's probabilities, advantages.
        with timer(timing, "adv"):
            token_rewards, weights = torch.zeros(offsets[-1], dtype=torch.float64), torch.ones(offsets[-1])     # (R,), (R,)
            if args.use_kl_in_reward:
                token_rewards, kl, responses = kl_in_reward(token_rewards, old_logp.double().cpu(), ref_logp.double().cpu(), row, len(samples), args.kl_penalty, kl_coef)
                metrics |= {"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": kl_coef}
                kl_coef = next_kl_coef(args, kl_coef, kl, responses)
            if corrects:
                weights, mask, mismatch = rollout_correction(args, old_logp.double().cpu() - engine_logp, lengths, mask)
                metrics |= mismatch
            advantages = token_advantages(args, rewards, token_rewards, lengths, group, mask, baselines)        # (R,)
            trained = sum_by(row, mask.long(), len(samples))                                                    # (N,) tokens with a loss
            tokens = {"old_logp": old_logp, "advantages": advantages.float(), "row": row, "mask": mask, "weights": weights.float()}
            tokens = {name: values.to(device) for name, values in tokens.items()}  # old_logp, there already, stays one tensor under both names

        # 5. Update: per mini-batch one optimizer step, accumulated over micro-batches of a token budget.
        with timer(timing, "update_actor"):
            def accumulate(mini, loss_weight, num_tokens):
                sums = defaultdict(float)
                for micro in micro_batches(samples, mini, args.max_tokens_per_micro_batch):
                    chosen = micro or [mini[0]]  # a rank with nothing left runs along, at weight zero
                    inputs, labels = pack([samples[i] for i in chosen], device)
                    flat = flat_rows(offsets, chosen).to(device)
                    weight = loss_weight[flat] * bool(micro)                                                    # (R,)
                    logp, entropy = model.token_logprobs(inputs, labels, args.temperature, args.entropy_coeff != 0)
                    if one_forward and micro:
                        old_logp[flat] = logp.detach()
                    token_loss, shares = policy_loss(args, logp, **{k: v[flat] for k, v in tokens.items()})
                    terms = {"pg_loss": token_loss, "entropy": entropy}
                    token_loss = token_loss - args.entropy_coeff * entropy
                    if args.use_kl_loss:
                        terms["kl_loss"] = kl_penalty(logp, ref_logp[flat], args.kl_loss_type)
                        token_loss = token_loss + args.kl_loss_coef * terms["kl_loss"]
                    loss = torch.where(weight > 0, token_loss * weight, 0.0).sum()
                    (loss * world).backward()  # FSDP averages gradients over ranks: times world is the sum
                    sums["loss"] += loss.detach()
                    for values, per_token in ((terms, weight), (shares, 1 / num_tokens)):  # terms of the loss as they enter it, all else as a mean over tokens
                        for key, value in values.items():
                            sums[key] += torch.where(weight > 0, value.detach() * per_token, 0.0).sum()
                return sums

            totals, updates, skipped = defaultdict(float), 0, 0
            for param_group in optimizer.param_groups:  # set, not scheduled: a resumed run takes the command line's values
                param_group |= {"lr": lr, "weight_decay": args.weight_decay}
            for start in [*range(0, len(samples), mini_rows)] * args.ppo_epochs:
                mini = range(start, start + mini_rows)
                here = (start <= row) & (row < start + mini_rows) & mask                                        # (R,) its tokens with a loss
                num_tokens, num_rows = all_sum(here.sum(), (trained[mini] > 0).sum())
                if num_tokens == 0:
                    skipped += not args.filter_groups  # there it holds constant groups that fill up the batch: nothing is wrong
                    continue
                loss_weight = (loss_weights(trained, args.loss_agg_mode, num_tokens, num_rows, args.max_response_length)[row] * here).float().to(device)  # (R,)
                if args.loss in ("clip_cov", "kl_cov"):
                    now = batch_logprobs(model, samples, offsets, args, device, mini) if updates else old_logp
                    luck = np.concatenate([np.random.default_rng([seed, step]).random(length) for seed, length in zip(seeds, lengths.tolist())])  # on any rank the same
                    tokens["chosen"] = covariant_tokens(args, now, old_logp, advantages, here, torch.from_numpy(luck)).to(device)
                sums = within_memory(lambda: accumulate(mini, loss_weight, num_tokens), model, args)
                grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                grad_norm = grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else grad_norm
                loss, = all_sum(float(sums.pop("loss")))
                if math.isfinite(loss) and torch.isfinite(grad_norm):
                    optimizer.step()
                    updates += 1
                    for key, value in (sums | {"grad_norm": grad_norm / world}).items():  # the same on every rank; summed over ranks below
                        totals[key] += value
                else:
                    print0(f"warning: step {step}: loss {loss}, gradient norm {grad_norm.item()}; update skipped")
                    skipped += 1
                optimizer.zero_grad(set_to_none=True)
            if "ref" in saved and step % args.ref_ema_steps == 0:
                ema_update(ref, model, args.ref_ema_alpha)

        # 6. Weights to the engine, validation, checkpoint.
        with timer(timing, "sync"):
            if device.type == "cuda" and args.sleep == "always":
                torch.cuda.empty_cache()
            sync()
        metrics |= {"training/global_step": step, "training/epoch": (position - 1) // steps_per_epoch}
        if args.test_freq > 0 and (step % args.test_freq == 0 or step == total_steps):
            with timer(timing, "testing"):
                metrics |= validate(engine, scorer, tokenizer, val, args, rank, world)
        stopping, skipped_steps = stop_signal(), skipped_steps + 1 if skipped else 0
        if args.save_freq > 0 and (step % args.save_freq == 0 or step == total_steps or stopping):
            with timer(timing, "save_checkpoint"):
                move(model, optimizer, args, device)
                progress = {"step": step, "epoch": metrics["training/epoch"], "position": position, "kl_coef": kl_coef, "skipped_steps": skipped_steps}
                unsaved = try_save(run_dir, step, saved, progress, tokenizer, args.max_ckpt_to_keep)
                move(model, optimizer, args, "cpu")
        timing["timing/step"] = time.perf_counter() - started

        # 7. Metrics, over all ranks.
        mean = lambda values: stats("", values)["/mean"]
        raw, prompt_lengths = torch.tensor([s.score for s in scores]), torch.tensor([len(s.prompt_ids) for s in samples])
        row_advantages = sum_by(row, advantages, len(samples)) / lengths.clamp(min=1)
        metrics |= stats("critic/score", raw[present]) | stats("critic/rewards", (rewards + sum_by(row, token_rewards, len(samples)))[present])
        metrics |= stats("critic/advantages", row_advantages) | stats("response_length", lengths) | stats("prompt_length", prompt_lengths)
        metrics |= {f"actor/{key}": value / max(1, updates) for key, value in zip(totals, all_sum(*map(float, totals.values())))}
        metrics |= {"actor/lr": lr, "actor/skipped_updates": skipped, "critic/constant_groups_frac": 1 - mean(varied_groups(raw, group)),
                    "response_length/clip_ratio": mean(lengths == args.max_response_length), "rollout/stop_frac": mean(finished)}
        seen = ~engine_logp.isnan() & (updates > 0 or not one_forward)
        ours, theirs = old_logp.double().cpu()[seen], engine_logp[seen]
        apart = stats("", (ours.exp() - theirs.exp()).abs())
        metrics |= {"rollout/probs_diff_mean": apart["/mean"], "rollout/probs_diff_max": apart["/max"],
                    "rollout/kl": mean(theirs - ours), "rollout/k3_kl": mean((ours - theirs).expm1() - ours + theirs)}  # of the engine to the trainer
        everyone = [None] * world
        dist.all_gather_object(everyone, scores)
        total_tokens, = all_sum(lengths.sum() + prompt_lengths.sum())
        metrics |= summarize(list(itertools.chain(*everyone))) | timing | perf_metrics(total_tokens, 6 * parameters * total_tokens * args.ppo_epochs, timing, world)
        log(step, metrics)
        if rank == 0:
            dump_rollouts(run_dir, step, [
                {"prompt": tokenizer.decode(samples[i].prompt_ids), "response": texts[i], "ground_truth": train[rows[i]]["ground_truth"], "score": scores[i].score,
                 "advantage": row_advantages[i].item(), "finish_reason": samples[i].finish_reason, "response_ids": samples[i].response_ids}
                for i in range(min(args.dump_rollouts, len(samples)))])
        if skipped_steps >= args.max_skipped_steps > 0:
            dump_rollouts(run_dir, f"{step}_rank_{rank}_skipped", [
                {"prompt_ids": s.prompt_ids, "response": t, "response_ids": s.response_ids, "reward": r, "advantages": advantages[i:j].tolist(), "old_logp": old_logp[i:j].tolist()}
                for s, t, r, i, j in zip(samples, texts, rewards.tolist(), offsets, offsets[1:])])
            unsaved = f"{skipped_steps} steps in a row had an update that was skipped; the last batch is in {run_dir / 'rollouts'}/step_{step}_rank_*_skipped.jsonl"
        if stopping or skipped_steps >= args.max_skipped_steps > 0:
            break

    scorer.close()
    engine.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()
    if stopping or unsaved:
        sys.exit(f"grpo.py: {unsaved}" if unsaved else 128 + stopping)


if __name__ == "__main__":
    try:
        main()
    except torch.OutOfMemoryError as error:
        sys.exit(f"grpo.py: out of GPU memory ({str(error).split('. ')[0]}). Lower --max_tokens_per_micro_batch or --gpu_memory_utilization, "
                 "or set --sleep always, --gradient_checkpointing true, --optimizer_offload true or --offload_policy true.")
