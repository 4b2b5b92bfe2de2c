"""Stage 4b: reinforcement learning of a language model with a critic (PPO), in one file.

PPO (arXiv 1707.06347) as used for language models (1909.08593, 2203.02155). A token is an action, the text before it the
state. Against grpo.py there is more of: a critic V (the same backbone with a scalar head) that is trained beside the
actor, a reward per token (the score on the last token, minus beta times the KL to a reference model on every token) and
generalised advantage estimation (GAE, 1506.02438) from both. In exchange one response a prompt is enough.

One step:  prompts -> responses -> scores -> old and reference log-probs -> values -> KL in the reward -> GAE -> critic -> actor -> weights to the engine

    python ppo.py --train_files data/gsm8k/train.parquet --val_files data/gsm8k/test.parquet      one GPU, or a CPU
    torchrun --standalone --nproc_per_node=8 ppo.py --model_path Qwen/Qwen2.5-7B-Instruct ...     eight GPUs

Scores come from rules (--reward_fn), from a reward model (--reward_model), or both. With --cost_fn or --cost_model a second
critic learns the cost, and a Lagrange multiplier holds its mean below --cost_threshold (Safe-RLHF, 2310.12773).

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
from transformers import (AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, AutoModelForSequenceClassification,
                          GenerationConfig)

from merge import dump_rollouts, find_checkpoint, load_checkpoint, make_logger, perf_metrics, stats, timer, try_save
from prepare_data import batch_rows, load_prompts, resolve_model, tokenize
from reward import Scorer, method_for, summarize
from rollout import (Sample, Sampling, all_sum, build_engine, check_common, init_distributed, must_sleep, one_sentence, parse_args, print0, request_seeds,
                     score, stop_signals, validate, within_memory)


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
    # models and optimizers
    model_path: str = "Qwen/Qwen2.5-0.5B-Instruct"       # actor and reference: local directory or hub name
    critic_path: str = ""                                # critic's backbone, perhaps a reward model; "": model_path
    lr: float = 1e-6                                     # AdamW, actor
    critic_lr: float = 1e-5                              # AdamW, critic
    weight_decay: float = 0.01                           # AdamW
    warmup_steps: int = 0                                # steps of linear warm-up
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"  # after it; linear and cosine end at 0
    critic_warmup: int = 0                               # first steps that train the critic alone
    max_grad_norm: float = 1.0                           # clip each gradient's norm to this
    ppo_mini_batch_size: int = 64                        # prompts an optimizer step, over all GPUs
    ppo_epochs: int = 1                                  # passes over a batch
    critic_ppo_epochs: int = 0                           # of the critic; 0: as many as the actor's
    max_tokens_per_micro_batch: int = 16384              # prompt + response tokens of one forward/backward on one GPU
    gradient_checkpointing: bool = False                 # recompute layers in the backward: less memory, slower
    param_offload: bool = False                          # parameters wait on the host while the engine generates
    optimizer_offload: bool = False                      # optimizer states likewise
    offload_policy: bool = False                         # FSDP2's: parameters, gradients and optimizers live on the host
    compile: Literal["auto", "true", "false"] = "auto"   # torch.compile of layers and head; auto: on a GPU
    dtype: Literal["auto", "bf16", "fp32"] = "auto"      # compute; master weights are fp32. auto: bf16 on a GPU
    # rollout
    engine: Literal["vllm", "hf"] = "vllm"               # hf: Hugging Face generate, for CPUs and debugging
    n: int = 1                                           # responses a prompt; torchrun takes --n for its own: there write --rollout_n
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
    gamma: float = 1.0                                   # discount
    lam: float = 1.0                                     # GAE's lambda
    whiten_advantages: bool = True                       # advantages to mean 0, std 1 over the batch
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = "token-mean"  # token losses -> one
    clip_ratio_low: float = 0.2                          # ratio is clipped to [1 - low, 1 + high]
    clip_ratio_high: float = 0.2                         # likewise
    clip_ratio_c: float = 3.0                            # dual clip: bound of the loss at negative advantage; 0: off
    cliprange_value: float = 0.5                         # new values are clipped to old +- this in the critic's loss
    entropy_coeff: float = 0.0                           # entropy bonus
    use_kl_in_reward: bool = True                        # KL to the reference model (the initial one) as a penalty per token
    kl_coef: float = 0.001                               # its weight beta
    kl_penalty: Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"] = "kl"  # estimator
    kl_ctrl: Literal["fixed", "adaptive"] = "fixed"      # adaptive: beta follows kl_target (1909.08593)
    kl_target: float = 0.1                               # mean KL per token that adaptive aims at
    kl_horizon: int = 10000                              # responses over which it adapts
    use_kl_loss: bool = False                            # KL to the reference model in the actor's loss
    kl_loss_coef: float = 0.001                          # its weight
    kl_loss_type: Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "low_var_kl+", "k3+"] = "low_var_kl"  # estimator
    ref_ema_steps: int = 0                               # every so many steps the reference moves towards the actor (2404.09656); 0: never
    ref_ema_alpha: float = 0.6                           # by this share: ref = (1 - alpha) ref + alpha actor
    # reward
    reward_fn: str = "auto"                              # auto|robust|strict|flexible|boxed|verl_strict|math or path.py:function; none: reward model alone
    reward_timeout: float = 10.0                         # seconds an item may take
    reward_workers: int = 0                              # child processes a rank; 0: from the number of cores
    reward_model: str = ""                               # sequence classification model with one label: its score of prompt + response
    reward_model_weight: float = 1.0                     # is added with this weight
    reward_normalize: Literal["none", "batch", "running"] = "none"  # z-score by the batch's mean and std, or those of all batches so far
    reward_clip: float = 0.0                             # bound on |score| after that; 0: off
    missing_eos_penalty: float = 0.0                     # taken from the score of a response that was cut at max_response_length
    # Safe-RLHF
    cost_fn: str = ""                                    # path.py:function like a reward function; positive is harmful
    cost_model: str = ""                                 # or a model like --reward_model
    cost_threshold: float = 0.0                          # the mean cost to stay below
    lambda_init: float = 1.0                             # Lagrange multiplier
    lambda_lr: float = 0.1                               # its step, on the log
    lambda_max: float = 0.0                              # upper bound; 0: none
    lambda_update_delay_steps: int = 0                   # steps before it moves
    episode_cost_window_size: int = 128                  # responses over which the mean cost is taken
    # trainer
    total_epochs: int = 15                               # passes over the training prompts
    total_training_steps: int = 0                        # stop after this many steps instead
    test_freq: int = 10                                  # validate every so many steps and at the end; 0: never
    val_before_train: bool = True                        # validate before the first step
    val_n: int = 1                                       # responses a validation prompt; pass@k for n > 1
    val_temperature: float = 0.0                         # 0: greedy
    save_freq: int = 10                                  # checkpoint every so many steps and at the end; 0: never
    max_skipped_steps: int = 5                           # stop after so many steps in a row with an update that had to be skipped
    max_ckpt_to_keep: int = 0                            # older checkpoints are deleted; 0: keep all
    resume_mode: str = "auto"                            # auto: newest whole checkpoint of the run; disable; or a path
    project_name: str = "nanoverl"                       # folder of runs, and wandb's project
    experiment_name: str = "ppo"                         # folder of this run
    default_local_dir: str = "checkpoints"               # root of both
    logger: str = "console,jsonl,tensorboard"            # any of console,jsonl,tensorboard,wandb
    dump_rollouts: int = 8                               # responses a step written to rollouts/step_N.jsonl
    seed: int = 0                                        # of data order and sampling


def check(args, world):
    """Raise ValueError, in a sentence that names the option and the remedy, before anything expensive starts."""
    check_common(args, world, (
        (1, math.inf, "episode_cost_window_size"), (0, math.inf, "critic_ppo_epochs critic_warmup reward_clip lambda_max"), (0, 1, "lam"),
        (1e-9, math.inf, "lambda_init cliprange_value")), bad=(
        (args.reward_fn == "none" and not args.reward_model, "--reward_fn none leaves no reward: give --reward_model as well"),
        (args.cost_fn and args.cost_model, "--cost_fn and --cost_model both define the cost; give one"),
        (args.lambda_max and args.lambda_max < args.lambda_init, f"--lambda_max {args.lambda_max} is below --lambda_init {args.lambda_init}; raise it")))


# ---------------------------------------------------------------------------------------------------------------------
# Models: a packed row of sequences in; log-probs of the response tokens, or values, out

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


def hidden_states(model, inputs):
    """Last hidden states (1, T, H) -> those at inputs["index"] (R, H)."""
    index, inputs = inputs["index"], {k: v for k, v in inputs.items() if k != "index"}
    return model.base_model(**inputs, use_cache=False).last_hidden_state[0][index]


HEAD_CHUNK = 8192  # tokens whose logits exist at once; the backward recomputes them


def token_logprobs(self, inputs, labels, temperature, entropy_grad=False):
    """A method of the actor: pack()'s inputs and labels -> log-probs (R,), entropies (R,) at that temperature."""
    hidden, head = hidden_states(self, inputs), self.get_output_embeddings()                                  # (R, H)
    parts = [checkpoint(self.head_logprobs, h, head.weight, head.bias, y, temperature, entropy_grad, use_reentrant=False)
             for h, y in zip(hidden.split(HEAD_CHUNK), labels.split(HEAD_CHUNK))]
    return tuple(torch.cat(x) for x in zip(*parts))


def token_values(self, inputs):
    """A method of critics and reward models: pack()'s inputs -> the scalar head's output (R,), fp32, where index points.

    For a critic that is V of the state a response token is chosen in: the same place whose logits predict the token.
    """
    return hidden_states(self, inputs).float() @ self.score.weight.float()[0]


def load_model(path, args, device, head="lm", train=True, fp32=True):
    """A model sharded by FSDP2: with head "lm" and the method token_logprobs, or head "value" and token_values.

    fp32: of the master weights; a model that only runs forward may do with the compute dtype. A new value head is 0, so that V starts at 0.
    """
    bf16 = args.dtype == "bf16"
    options = dict(dtype=torch.float32 if fp32 or not bf16 else torch.bfloat16, attn_implementation="packed")
    if head == "lm":
        model = AutoModelForCausalLM.from_pretrained(path, **options)
        model.token_logprobs = types.MethodType(token_logprobs, model)
        model.head_logprobs = head_logprobs
    else:
        try:
            model, found = AutoModelForSequenceClassification.from_pretrained(path, num_labels=1, output_loading_info=True, **options)
        except RuntimeError as error:
            raise ValueError(f"{path} doesn't fit a model with one label; give a language model or a sequence classification model with one label") from error
        if not isinstance(getattr(model, "score", None), torch.nn.Linear) or model.score.bias is not None:
            raise ValueError(f"{type(model).__name__} has no plain linear head named score: critics and reward models of this architecture are not supported")
        if "score.weight" in found["missing_keys"]:
            if not train:
                raise ValueError(f"{path} is no reward model: it has no head score.weight; give a sequence classification model with one label")
            torch.nn.init.zeros_(model.score.weight)
        model.token_values = types.MethodType(token_values, model)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # dropout would make the ratio differ from 1 before the first update
    check_forward(model)
    model.train(train).requires_grad_(train)
    if train and args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layers = model.base_model.layers
    if args.compile == "true":
        torch._dynamo.config.recompile_limit = 64  # actor, critic and reference share the code of a layer, each with and without gradient
        if head == "lm":
            model.head_logprobs = torch.compile(head_logprobs, dynamic=True)
        for layer in layers:
            layer.compile(dynamic=True)
    policy = dict(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32),
                  offload_policy=CPUOffloadPolicy() if args.offload_policy else OffloadPolicy())
    mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh, **policy)
    fully_shard(model, mesh=mesh, **policy)  # embedding, last norm and head (perhaps the embedding once more) in one unit
    register_fsdp_forward_method(model, "token_logprobs" if head == "lm" else "token_values")
    if not args.offload_policy:
        model.to(device)
    return model


@torch.no_grad()
def check_forward(model):
    """Two short sequences packed must give what each gives alone in the model's own forward, or its architecture isn't the plain
    one assumed above (logits scaled or soft-capped, attention with extras) and training would be silently wrong."""
    ids = torch.arange(1, 12) % model.config.vocab_size
    inputs = {"input_ids": ids[None], "position_ids": torch.tensor([[*range(4), *range(7)]]), "max_length_q": 7,
              "cu_seq_lens_q": torch.tensor([0, 4, 11], dtype=torch.int32), "index": torch.tensor([0, 1, 2, 4, 5, 6, 7, 8, 9])}
    if hasattr(model, "token_logprobs"):
        packed = model.token_logprobs(inputs, ids[inputs["index"] + 1], 1.0)[0]
        own = lambda s: model(input_ids=s[None], use_cache=False).logits[0, :-1].float().log_softmax(-1).gather(-1, s[1:, None])[:, 0]
    else:  # what goes into the head, which may be 0
        packed = hidden_states(model, inputs)
        own = lambda s: model.base_model(input_ids=s[None], use_cache=False).last_hidden_state[0, :-1]
    model.set_attn_implementation("sdpa")
    alone = torch.cat([own(s) for s in (ids[:4], ids[4:])])
    model.set_attn_implementation("packed")
    error = (packed - alone).abs().max() / alone.abs().max().clamp(min=1)
    if error > (1e-3 if alone.dtype == torch.float32 and model.dtype == torch.float32 else 0.1):
        raise ValueError(f"packed outputs of {type(model).__name__} differ from its own forward by {error:.3g}; this architecture is "
                         "not supported (are its logits scaled or soft-capped?)")


def move(pairs, args, device):
    """Idle offload: parameters and optimizer states of (model, optimizer) pairs to the host ("cpu") for the rollout, or back."""
    for model, optimizer in pairs:
        if args.param_offload:
            model.to(device)
        if args.optimizer_offload:
            for state in optimizer.state.values():
                state |= {k: v.to(device) for k, v in state.items() if torch.is_tensor(v) and v.dim() > 0}


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
def batch_forward(forward, samples, offsets, args, device):
    """forward(inputs, labels) -> (R,) over this rank's whole batch: micro-batches in, flat tensor (R,) out."""
    out = torch.zeros(offsets[-1], device=device)
    for rows in micro_batches(samples, range(len(samples)), 2 * args.max_tokens_per_micro_batch):
        values = forward(*pack([samples[i] for i in rows or [0]], device))
        if rows:
            out[flat_rows(offsets, rows).to(device)] = values
    return out


def batch_logprobs(model, samples, offsets, args, device):
    """Log-probs (R,) of all response tokens of this rank's batch under `model`."""
    return batch_forward(lambda inputs, labels: model.token_logprobs(inputs, labels, args.temperature)[0], samples, offsets, args, device)


def batch_values(critic, samples, offsets, args, device):
    """Values (R,) of the states in which the response tokens were chosen."""
    return batch_forward(lambda inputs, labels: critic.token_values(inputs), samples, offsets, args, device)


@torch.no_grad()
def model_scores(model, samples, args, device):
    """A reward or cost model's score (N,) of each sample: the scalar head at its last token, as transformers' own forward takes it."""
    scores = torch.zeros(len(samples), device=device)
    if not args.offload_policy:
        model.to(device)
    for rows in micro_batches(samples, range(len(samples)), 2 * args.max_tokens_per_micro_batch):
        inputs, _ = pack([samples[i] for i in rows or [0]], device)
        inputs["index"] = inputs["cu_seq_lens_q"][1:].long() - 1
        values = model.token_values(inputs)
        if rows:
            scores[rows] = values
    model.reshard()
    model.to("cpu")  # it waits on the host until the next step
    return scores.double().cpu()


def retemplate(samples, prompts, tokenizer, model_tokenizer, longest):
    """Samples as the reward model's own chat template and tokenizer write them; untouched when both equal the actor's.

    prompts: the row of each sample (messages in "prompt"). A conversation of more than `longest` tokens loses its head.
    """
    if model_tokenizer.chat_template == tokenizer.chat_template and model_tokenizer.get_vocab() == tokenizer.get_vocab():
        return samples
    texts = tokenizer.batch_decode([s.response_ids for s in samples], skip_special_tokens=True)
    conversations = [[*map(dict, p["prompt"]), {"role": "assistant", "content": t}] for p, t in zip(prompts, texts)]
    ids = tokenize(conversations, model_tokenizer, add_generation_prompt=False)
    return [Sample(row[-longest:], [], s.finish_reason, None) for row, s in zip(ids, samples)]


# ---------------------------------------------------------------------------------------------------------------------
# The algorithm

def moments(x):
    """Count, mean and sample variance of a tensor over all ranks, in two passes and float64; 0 for nothing."""
    x = x.double()
    count, total = all_sum(x.numel(), x.sum().item())
    mean = total / max(count, 1)
    return count, mean, all_sum((x - mean).square().sum().item())[0] / max(count - 1, 1)


def whiten(x, shift_mean=True):
    """To mean 0 and variance 1 over all ranks: (x - mean) / sqrt(var + 1e-8), sample variance. A single value becomes 0."""
    _, mean, var = moments(x)
    whitened = (x.double() - mean) * (var + 1e-8) ** -0.5
    return whitened if shift_mean else whitened + mean


def normalize_rewards(rewards, running=None):
    """z-score (R - mean) / (std + 1e-8) over all ranks, sample std; NaN, a missing reward, has no part and stays.

    running: {count, mean, m2} of all earlier batches, updated in place (Chan et al. 1979); its moments are then used.
    """
    count, mean, var = moments(rewards[~rewards.isnan()])
    if running is not None:
        before, delta, total = running["count"], mean - running["mean"], running["count"] + count
        running["m2"] += var * max(count - 1, 0) + delta**2 * before * count / max(total, 1)
        running["mean"] += delta * count / max(total, 1)
        running["count"] = total
        mean, var = running["mean"], running["m2"] / max(total - 1, 1)
    return (rewards - mean) / (math.sqrt(var) + 1e-8)


def token_rewards(scores, kl, kl_coef, lengths):
    """Reward of every token: -beta KL, and on a response's last one its score too (2203.02155). (N,), (R,), float, (N,) -> (R,)."""
    rewards = -kl_coef * kl.double()
    full = lengths > 0
    rewards[lengths.cumsum(0)[full] - 1] += scores.double()[full]
    return rewards


def next_kl_coef(kl_coef, current_kl, num_responses, target, horizon):
    """Adaptive controller (1909.08593): beta (1 + clip(KL/target - 1, -.2, .2) n/horizon), never below 0.

    current_kl: mean over responses of their mean KL per token, as in verl; the paper sums over the response.
    """
    return kl_coef * max(0.0, 1 + min(max(current_kl / target - 1, -0.2), 0.2) * num_responses / horizon)


def row_means(x, lengths):
    """Mean of each response's tokens: (R,), (N,) -> (N,); 0 for an empty response."""
    row = torch.arange(len(lengths)).repeat_interleave(lengths)
    return torch.zeros(len(lengths), dtype=torch.float64).index_add(0, row, x.double()) / lengths.clamp(min=1)


def gae(rewards, values, lengths, gamma=1.0, lam=1.0):
    """Generalised advantage estimation (1506.02438): (R,), (R,), (N,) -> advantages (R,), not whitened, and returns (R,). float64.

    A_t = sum_k (gamma lam)^k delta_{t+k}, delta_t = r_t + gamma V_{t+1} - V_t, V = 0 after the last token, also of a cut response.
    """
    valid = torch.arange(max(1, int(lengths.max()))) < lengths[:, None]                                       # (N, L)
    r, v = (torch.zeros(valid.shape, dtype=torch.float64).masked_scatter(valid, x.double()) for x in (rewards, values))
    advantages, following, next_value = torch.zeros_like(r), torch.zeros(len(lengths), dtype=torch.float64), 0.0
    for t in reversed(range(r.shape[1])):  # beyond a response's end r, v and so delta are 0
        following = r[:, t] + gamma * next_value - v[:, t] + gamma * lam * following
        advantages[:, t], next_value = following, v[:, t]
    return advantages[valid], (advantages + v)[valid]


def value_loss(values, old_values, returns, cliprange):
    """Clipped squared error per token, 0.5 max((V - R)^2, (clip(V, V_old +- c) - R)^2) (1707.06347's code). All (R,)."""
    clipped = torch.maximum(torch.minimum(values, old_values + cliprange), old_values - cliprange)
    plain, other = (values - returns).square(), (clipped - returns).square()
    loss = 0.5 * torch.maximum(plain, other)
    return loss, {"vf_loss": loss, "vf_clipfrac": (other > plain).float(), "vpred_mean": values}


def next_log_lambda(log_lambda, mean_cost, args):
    """Ascent of the Lagrange multiplier on its log (2310.12773, eq. 31): log lambda + lr (Jc - threshold) lambda, capped."""
    log_lambda += args.lambda_lr * (mean_cost - args.cost_threshold) * math.exp(log_lambda)
    return min(log_lambda, math.log(args.lambda_max)) if args.lambda_max else log_lambda


def mix_advantages(reward_advantages, cost_advantages, multiplier):
    """(A_R - lambda A_C) / (1 + lambda) (2310.12773)."""
    return (reward_advantages - multiplier * cost_advantages) / (1 + multiplier)


@torch.no_grad()
def ema_update(ref, model, alpha):
    """Reference <- (1 - alpha) reference + alpha model (TR-DPO, 2404.09656; alpha is the model's share as in TRL), shard by shard."""
    ref.reshard(), model.reshard()  # after a forward without gradient FSDP2 leaves the root's parameters unsharded
    for old, new in zip(ref.parameters(), model.parameters()):
        old.lerp_(new.to(old.dtype), alpha)


def loss_weights(lengths, mode, tokens, rows, max_length):
    """Weight (N,) of each response's token losses so that their plain sum over all micro-batches and ranks is the aggregated loss.

    lengths (N,): trained tokens a response. tokens, rows: trained tokens, and responses that have any, in the mini-batch of all ranks.
    """
    divisor = {"token-mean": tokens,                                   # DAPO, 2503.14476
               "seq-mean-token-sum": rows,
               "seq-mean-token-mean": rows * lengths.clamp(min=1),     # GRPO, 2402.03300
               "seq-mean-token-sum-norm": rows * max_length}[mode]     # Dr. GRPO, 2503.20783, with max_length for its constant
    return 1 / torch.as_tensor(divisor, dtype=torch.float64).clamp(min=1).expand(len(lengths))


def policy_loss(logp, old_logp, advantages, low=0.2, high=0.2, c=3.0):
    """PPO's clipped loss per token (arXiv 1707.06347) with separate bounds (DAPO) and dual clip (1912.09729).

    All (R,). c bounds the loss of negative advantages at -c A; 0: off. The log-ratio is clamped to +-20 as in verl, with no
    gradient outside. Returns the loss (R,) and per-token metrics (R,).
    """
    log_ratio = (logp - old_logp).clamp(-20, 20)
    ratio = log_ratio.exp()
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
    loss = torch.maximum(plain, clipped)
    metrics = {"pg_clipfrac": (clipped > plain).float(), "ppo_kl": -(logp - old_logp).detach()}
    if c:
        metrics["pg_clipfrac_lower"] = ((loss > -c * advantages) & (advantages < 0)).float()
        loss = torch.where(advantages < 0, torch.minimum(loss, -c * advantages), loss)
    return loss, metrics


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

def optimize(model, optimizer, lr, epochs, token_losses, batch, args, device):
    """`epochs` passes over the batch in mini-batches of one optimizer step each, accumulated over micro-batches of a token budget.

    token_losses(inputs, labels, flat) -> losses (R,) and metrics {name: (R,)} of a micro-batch; flat: its places in the batch's
    flat tensors. batch: samples, offsets (N + 1,), trained (N,) tokens with a loss. The loss is a plain sum of token losses times
    weights that count the whole mini-batch on all ranks, so that neither micro-batches nor the number of ranks change the gradient.
    An update whose loss or gradient isn't finite is skipped. Returns metrics, means over the updates made.
    """
    samples, offsets, trained = batch
    world, totals, updates, skipped = dist.get_world_size(), defaultdict(float), 0, 0
    for param_group in optimizer.param_groups:  # set, not scheduled: a resumed run takes the command line's values
        param_group |= {"lr": lr, "weight_decay": args.weight_decay}

    def accumulate(mini, weights, tokens):
        sums = defaultdict(float)
        for micro in micro_batches(samples, mini, args.max_tokens_per_micro_batch):
            chosen = micro or [mini[0]]  # a rank with nothing left runs along, at weight zero
            inputs, labels = pack([samples[i] for i in chosen], device)
            flat = flat_rows(offsets, chosen).to(device)
            weight = (weights * bool(micro))[chosen].repeat_interleave(torch.tensor([len(samples[i].response_ids) for i in chosen])).to(device)  # (R,)
            losses, metrics = token_losses(inputs, labels, flat)
            loss = torch.where(weight > 0, losses * weight, 0.0).sum()
            (loss * world).backward()  # FSDP averages gradients over ranks: times world is the sum
            sums["loss"] += loss.detach()
            for key, value in metrics.items():  # terms of the loss as they enter it, all else as a mean over tokens
                per_token = weight if key in ("pg_loss", "vf_loss", "kl_loss") else 1 / max(tokens, 1)
                sums[key] += torch.where(weight > 0, value.detach() * per_token, 0.0).sum()
        return sums

    mini_rows = args.ppo_mini_batch_size // world * args.n
    for start in [*range(0, len(samples), mini_rows)] * epochs:
        mini = range(start, start + mini_rows)
        lengths = trained[mini]
        tokens, rows = all_sum(int(lengths.sum()), int((lengths > 0).sum()))
        weights = torch.zeros(len(samples))
        weights[mini] = (loss_weights(lengths, args.loss_agg_mode, tokens, rows, args.max_response_length) * (lengths > 0)).float()
        sums = within_memory(lambda: accumulate(mini, weights, tokens), model, args)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        grad_norm = grad_norm.full_tensor() if isinstance(grad_norm, DTensor) else grad_norm
        loss, = all_sum(float(sums.pop("loss")))
        if tokens and math.isfinite(loss) and torch.isfinite(grad_norm):
            optimizer.step()
            updates += 1
            for key, value in (sums | {"grad_norm": grad_norm / world}).items():
                totals[key] += value
        else:
            print0(f"warning: an update of {tokens:.0f} tokens with loss {loss} and gradient norm {grad_norm.item()} was skipped")
            skipped += 1
        optimizer.zero_grad(set_to_none=True)
    summed = all_sum(*map(float, totals.values()))
    return {k: v / max(1, updates) for k, v in zip(totals, summed)} | {"lr": lr, "skipped_updates": skipped}


def learning_rate(base, step, total_steps, args):
    """Of a step counted from 1: linear warm-up, then --lr_scheduler_type down to 0 one step after the last."""
    done = max(0.0, (step - 1 - args.warmup_steps) / max(1, total_steps - args.warmup_steps))
    decay = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[args.lr_scheduler_type]
    return base * min(1.0, step / max(1, args.warmup_steps)) * decay


def setup(args):
    """All that can fail on bad input, before anything expensive: processes, options, model directories, data, reward functions."""
    rank, world, device = init_distributed()
    args.dtype = {"auto": "bf16" if device.type == "cuda" else "fp32"}.get(args.dtype, args.dtype)
    args.compile = {"auto": "true" if device.type == "cuda" else "false"}.get(args.compile, args.compile)
    check(args, world)
    if args.offload_policy and device.type == "cpu":
        raise ValueError("--offload_policy true needs a GPU to offload from; leave it out")
    args.model_path, config, tokenizer = resolve_model(args.model_path)
    args.critic_path, critic_config, critic_tokenizer = resolve_model(args.critic_path or args.model_path, "critic_path")
    if critic_tokenizer.get_vocab() != tokenizer.get_vocab():
        raise ValueError(f"--critic_path {args.critic_path} has another tokenizer than --model_path {args.model_path}: a critic reads the actor's token "
                         "ids; take one of the same family")
    judges = {}  # name -> (path, config, tokenizer) of reward and cost model
    for option in ("reward_model", "cost_model"):
        if getattr(args, option):
            judges[option] = resolve_model(getattr(args, option), option)
            if judges[option][1].num_labels != 1:
                raise ValueError(f"--{option} {getattr(args, option)} has {judges[option][1].num_labels} labels; give a sequence classification model with one")
            if not judges[option][2].chat_template and judges[option][2].get_vocab() != tokenizer.get_vocab():
                raise ValueError(f"--{option} {getattr(args, option)} has another tokenizer than the actor and no chat template to write conversations "
                                 "with; add a chat_template.jinja to its directory")
    for option, c in (("model_path", config), ("critic_path", critic_config), *((option, judge[1]) for option, judge in judges.items())):
        if (longest := getattr(c, "max_position_embeddings", None)) and args.max_prompt_length + args.max_response_length > longest:
            raise ValueError(f"--max_prompt_length {args.max_prompt_length} + --max_response_length {args.max_response_length} is beyond the {longest} "
                             f"positions of --{option} {getattr(args, option)}; lower one of them")
    read = lambda files, rows: load_prompts(files.split(","), tokenizer, args.max_prompt_length, prompt_key=args.prompt_key,
                                            truncation=args.truncation, min_rows=rows, need_truth=args.reward_fn != "none") if files else []
    train, val = read(args.train_files, args.train_batch_size), read(args.val_files, 1)
    if args.reward_fn == "auto":
        for source in {row["data_source"] for row in train + val}:
            method_for(source)  # raises for one that has no rule
    if args.reward_model and 0 < len(val) < world:
        raise ValueError(f"--val_files has {len(val)} prompts, less than one for each of {world} GPUs; add some, or give --val_files ''")
    cores = (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])
    workers = args.reward_workers or max(1, min(8, cores - 1))
    scorer = Scorer(args.reward_fn, workers=workers, timeout=args.reward_timeout) if args.reward_fn != "none" else None
    try:
        cost_scorer = Scorer(args.cost_fn, workers=workers, timeout=args.reward_timeout) if args.cost_fn else None
    except ValueError as error:
        raise ValueError(str(error).replace("--reward_fn", "--cost_fn")) from None
    run_dir = Path(args.default_local_dir) / args.project_name / args.experiment_name
    resume_from = find_checkpoint(run_dir, args.resume_mode)
    return rank, world, device, config, tokenizer, judges, train, val, scorer, cost_scorer, run_dir, resume_from


@record  # torchrun ends with the traceback of the rank that failed first
def main():
    args = parse_args(Args)
    with one_sentence():
        rank, world, device, config, tokenizer, judges, train, val, scorer, cost_scorer, run_dir, resume_from = setup(args)

    # -----------------------------------------------------------------------------------------------------------------
    # Engine, models, optimizers, resume
    run_dir.mkdir(parents=True, exist_ok=True)
    generation_config = None
    with contextlib.suppress(OSError):
        generation_config = GenerationConfig.from_pretrained(args.model_path)
    safe, needs_ref = bool(args.cost_fn or args.cost_model), args.use_kl_in_reward or args.use_kl_loss
    if args.sleep == "auto":
        args.sleep = "always" if device.type == "cuda" and must_sleep(args, config, world, trained=2 + safe) else "never"
    adamw = lambda model: torch.optim.AdamW(model.parameters(), weight_decay=args.weight_decay, betas=(0.9, 0.999), fused=device.type == "cuda" and not args.offload_policy)
    with one_sentence():
        engine = build_engine(args, args.model_path, tokenizer, generation_config, device)
        engine.sleep()
        actor = load_model(args.model_path, args, device)
        critic = load_model(args.critic_path, args, device, head="value")
        cost_critic = load_model(args.critic_path, args, device, head="value") if safe else None
        ref = load_model(args.model_path, args, device, train=False, fp32=args.ref_ema_steps > 0) if needs_ref else None
        judges = {name: (load_model(path, args, device, head="value", train=False, fp32=False).to("cpu"), judge_tokenizer, getattr(judge_config, 'max_position_embeddings', 2**31))
                  for name, (path, judge_config, judge_tokenizer) in judges.items()}
    trained = {"actor": (actor, adamw(actor)), "critic": (critic, adamw(critic))} | ({"cost_critic": (cost_critic, adamw(cost_critic))} if safe else {})
    saved = trained | ({"ref": (ref, None)} if args.ref_ema_steps else {})
    state = {"step": 0, "kl_coef": args.kl_coef, "rewards": {"count": 0, "mean": 0.0, "m2": 0.0}, "log_lambda": math.log(args.lambda_init), "costs": [], "skipped_steps": 0}
    if resume_from:
        with one_sentence():
            state |= {k: v for k, v in load_checkpoint(resume_from, saved).items() if k in state and (k, args.kl_ctrl) != ("kl_coef", "fixed")}
    parameters, start_step = sum(p.numel() for p in actor.parameters()), state["step"]
    steps_per_epoch = len(train) // args.train_batch_size
    total_steps = args.total_training_steps or args.total_epochs * steps_per_epoch
    sampling = Sampling(temperature=args.temperature, top_p=args.top_p, top_k=args.top_k, max_tokens=args.max_response_length, ignore_eos=args.ignore_eos)
    if rank == 0:
        (run_dir / "args.json").write_text(json.dumps(dataclasses.asdict(args), indent=1))
    log = make_logger(args, run_dir, start_step) if rank == 0 else lambda step, metrics: None
    print0(f"{type(actor).__name__} of {parameters / 1e6:.1f}M parameters and critic on {world} x {torch.cuda.get_device_name() if device.type == 'cuda' else 'CPU'}, "
           f"{args.dtype} compute, fp32 masters; engine {args.engine}, sleep {args.sleep}; sampling {sampling}; {total_steps} steps, {steps_per_epoch} an epoch"
           + (f"; resumed from {resume_from}" if resume_from else ""))

    def sync():
        move([trained["actor"]], args, device)
        engine.update_weights(actor)
        move(trained.values(), args, "cpu")

    def judge(name, samples, prompts):  # scores (N,) by the reward or cost model
        model, judge_tokenizer, longest = judges[name]
        return model_scores(model, retemplate(samples, prompts, tokenizer, judge_tokenizer, longest), args, device)

    def evaluate():
        return validate(engine, scorer, tokenizer, val, args, rank, world, judge=(lambda *x: judge("reward_model", *x)) if "reward_model" in judges else None)

    if start_step >= total_steps:
        print0(f"nothing to do: {resume_from} has all {total_steps} steps; raise --total_training_steps, or take another --experiment_name")
    sync()
    if args.val_before_train and start_step == 0 and val:
        log(0, evaluate())

    # -----------------------------------------------------------------------------------------------------------------
    # Training. This rank answers its share of each batch, n times each: of every mini-batch the same share, so that an
    # optimizer step sees the same prompts on any number of ranks.
    stop_signal, stopping, unsaved = stop_signals(), 0, None
    places = np.arange(args.train_batch_size).reshape(-1, world, args.ppo_mini_batch_size // world)[:, rank].flatten()
    for step in tqdm(range(start_step + 1, total_steps + 1), initial=start_step, total=total_steps, desc="steps", disable=rank != 0, file=sys.stderr):
        timing, metrics, started = defaultdict(float), {"training/global_step": step, "training/epoch": (step - 1) // steps_per_epoch}, time.perf_counter()

        # 1. Prompts -> responses.
        prompts = [train[i] for i in batch_rows(len(train), args.train_batch_size, args.seed, step - 1)[places] for _ in range(args.n)]
        seeds = np.reshape(request_seeds(args.seed, step, args.train_batch_size * args.n), (-1, args.n))[places].flatten().tolist()
        with timer(timing, "gen"):
            samples = engine.generate([p["prompt_ids"] for p in prompts], sampling, seeds)
            engine.sleep()
        if args.sleep == "always" and device.type == "cuda":
            metrics["perf/memory_asleep_gb"] = np.subtract(*torch.cuda.mem_get_info()[::-1]) / 2**30
        lengths = torch.tensor([len(s.response_ids) for s in samples])                                          # (N,)
        offsets = [0, *lengths.cumsum(0).tolist()]                                                              # sample i: flat[offsets[i]:offsets[i + 1]]
        move(trained.values(), args, device)

        # 2. Scores, one a response: rules and reward model. One that could not be had is NaN: that response is left out of everything.
        with timer(timing, "reward"):
            texts, rules = score(scorer, tokenizer, samples, prompts)
            scores = torch.tensor([r.score for r in rules], dtype=torch.float64)                                # (N,)
            if "reward_model" in judges:
                model_score = judge("reward_model", samples, prompts)
                metrics |= stats("reward/model", model_score)
                scores = args.reward_model_weight * model_score + (scores if scorer else 0)
            metrics |= stats("critic/score", scores[~scores.isnan()])
            if args.reward_normalize != "none":
                scores = normalize_rewards(scores, state["rewards"] if args.reward_normalize == "running" else None)
            if args.reward_clip:
                scores = scores.clamp(-args.reward_clip, args.reward_clip)
            scores = scores - args.missing_eos_penalty * torch.tensor([s.finish_reason != "stop" for s in samples])
            if safe:
                costs = judge("cost_model", samples, prompts) if args.cost_model else torch.tensor([s.score for s in score(cost_scorer, tokenizer, samples, prompts)[1]], dtype=torch.float64)
                scores = torch.where(costs.isnan(), math.nan, scores)
            present = ~scores.isnan()
            trained_lengths = torch.where(present, lengths, 0)                                                  # (N,) tokens with a loss

        # 3. Log-probs before the update, of the actor and of the reference; values of the critics.
        with timer(timing, "old_log_prob"):
            old_logp = batch_logprobs(actor, samples, offsets, args, device)                                    # (R,)
        if ref is not None:
            with timer(timing, "ref"):
                ref_logp = batch_logprobs(ref, samples, offsets, args, device)                                  # (R,)
        with timer(timing, "values"):
            values = batch_values(critic, samples, offsets, args, device)                                       # (R,)
            if safe:
                cost_values = batch_values(cost_critic, samples, offsets, args, device)                         # (R,)

        # 4. KL in the reward, advantages and returns, one a token.
        with timer(timing, "adv"):
            before, keep = values.cpu(), present.repeat_interleave(lengths)                                     # (R,), (R,) tokens with a loss
            kl, beta = torch.zeros(offsets[-1], dtype=torch.float64), state["kl_coef"]                          # (R,); 0 without a penalty
            if args.use_kl_in_reward:
                kl = kl_penalty(old_logp, ref_logp, args.kl_penalty).double().cpu()
                current_kl = stats("kl", row_means(kl, lengths)[present])["kl/mean"]
                metrics |= {"actor/reward_kl_penalty": current_kl, "actor/reward_kl_penalty_coeff": beta}
            rewards = token_rewards(scores.nan_to_num(0.0), kl, beta, lengths)                                  # (R,)
            advantages, returns = gae(rewards, before, lengths, args.gamma, args.lam)                           # (R,), (R,)
            if args.use_kl_in_reward and args.kl_ctrl == "adaptive":
                state["kl_coef"] = next_kl_coef(beta, current_kl, args.train_batch_size * args.n, args.kl_target, args.kl_horizon)
            if safe:  # the multiplier moves first, by the costs of the last responses; KL raises costs as it lowers rewards
                everyone = [None] * world
                dist.all_gather_object(everyone, list(zip(np.repeat(places, args.n).tolist(), costs.tolist())))
                new = [c for _, c in sorted(itertools.chain(*everyone), key=lambda x: x[0]) if not math.isnan(c)]  # in the order of the batch on any number of ranks
                state["costs"] = [*state["costs"], *new][-args.episode_cost_window_size:]
                mean_cost = float(np.mean(state["costs"] or [args.cost_threshold]))
                if step > args.lambda_update_delay_steps:
                    state["log_lambda"] = next_log_lambda(state["log_lambda"], mean_cost, args)
                cost_advantages, cost_returns = gae(token_rewards(costs.nan_to_num(0.0), -kl, beta, lengths),
                                                    cost_values.cpu(), lengths, args.gamma, args.lam)
                cost_returns = cost_returns.float().to(device)
                advantages = mix_advantages(advantages, cost_advantages, math.exp(state["log_lambda"]))
                metrics |= {"safe/cost_window_mean": mean_cost, "safe/lambda": math.exp(state["log_lambda"])} | stats("safe/cost", costs[~costs.isnan()])
            if args.whiten_advantages:
                advantages[keep] = whiten(advantages[keep])
            residual, spread = moments((returns - before)[keep])[2], moments(returns[keep])[2]
            metrics["critic/vf_explained_var"] = 1 - residual / (spread + 1e-5)
            for name, x in (("rewards", row_means(rewards, lengths)[present] * lengths[present]), ("advantages", advantages[keep]), ("returns", returns[keep]), ("values", before[keep])):
                metrics |= stats(f"critic/{name}", x)
            advantages, returns = advantages.float().to(device), returns.float().to(device)

        # 5. Critic, then actor: per mini-batch one optimizer step each.
        batch = samples, offsets, trained_lengths
        how = learning_rate(args.critic_lr, step, total_steps, args), args.critic_ppo_epochs or args.ppo_epochs
        with timer(timing, "update_critic"):
            losses = lambda inputs, labels, flat: value_loss(critic.token_values(inputs), values[flat], returns[flat], args.cliprange_value)
            metrics |= {f"critic/{k}": v for k, v in optimize(*trained["critic"], *how, losses, batch, args, device).items()}
            if safe:
                losses = lambda inputs, labels, flat: value_loss(cost_critic.token_values(inputs), cost_values[flat], cost_returns[flat], args.cliprange_value)
                metrics |= {f"cost_critic/{k}": v for k, v in optimize(*trained["cost_critic"], *how, losses, batch, args, device).items()}
        if step > args.critic_warmup:
            def actor_losses(inputs, labels, flat):
                logp, entropy = actor.token_logprobs(inputs, labels, args.temperature, args.entropy_coeff != 0)
                loss, terms = policy_loss(logp, old_logp[flat], advantages[flat], args.clip_ratio_low, args.clip_ratio_high, args.clip_ratio_c)
                terms |= {"pg_loss": loss, "entropy": entropy}
                loss = loss - args.entropy_coeff * entropy
                if args.use_kl_loss:
                    terms["kl_loss"] = kl_penalty(logp, ref_logp[flat], args.kl_loss_type)
                    loss = loss + args.kl_loss_coef * terms["kl_loss"]
                return loss, terms
            how = learning_rate(args.lr, step, total_steps, args), args.ppo_epochs
            with timer(timing, "update_actor"):
                metrics |= {f"actor/{k}": v for k, v in optimize(*trained["actor"], *how, actor_losses, batch, args, device).items()}
        if args.ref_ema_steps and step % args.ref_ema_steps == 0:
            ema_update(ref, actor, args.ref_ema_alpha)

        # 6. Weights to the engine, validation, checkpoint.
        with timer(timing, "sync"):
            if device.type == "cuda" and args.sleep == "always":
                torch.cuda.empty_cache()
            sync()
        if args.test_freq > 0 and (step % args.test_freq == 0 or step == total_steps):
            with timer(timing, "testing"):
                metrics |= evaluate()
        state |= {"step": step, "skipped_steps": state["skipped_steps"] + 1 if metrics["critic/skipped_updates"] + metrics.get("actor/skipped_updates", 0) else 0}
        stopping = stop_signal()
        if args.save_freq > 0 and (step % args.save_freq == 0 or step == total_steps or stopping):
            with timer(timing, "save_checkpoint"):
                move(trained.values(), args, device)
                unsaved = try_save(run_dir, step, saved, state | {"epoch": metrics["training/epoch"]}, tokenizer, args.max_ckpt_to_keep)
                move(trained.values(), args, "cpu")
        timing["timing/step"] = time.perf_counter() - started

        # 7. Metrics, over all ranks.
        mean = lambda values: stats("", values)["/mean"]
        prompt_lengths, finished = torch.tensor([len(s.prompt_ids) for s in samples]), torch.tensor([s.finish_reason == "stop" for s in samples])
        metrics |= stats("response_length", lengths) | stats("prompt_length", prompt_lengths)
        metrics |= {"response_length/clip_ratio": mean(lengths == args.max_response_length), "rollout/stop_frac": mean(finished)}
        engine_logp = torch.tensor([x for s in samples for x in s.logp or [math.nan] * len(s.response_ids)])     # (R,); NaN where the engine gave none
        apart = stats("", (old_logp.cpu().exp() - engine_logp.exp()).abs()[~engine_logp.isnan()])
        metrics |= {"rollout/probs_diff_mean": apart["/mean"], "rollout/probs_diff_max": apart["/max"]}
        everyone = [None] * world
        dist.all_gather_object(everyone, rules)
        metrics |= summarize(list(itertools.chain(*everyone))) if scorer else {}
        num_tokens, = all_sum(lengths.sum() + prompt_lengths.sum())
        flops = 6 * parameters * num_tokens * ((args.critic_ppo_epochs or args.ppo_epochs) * (len(trained) - 1) + args.ppo_epochs * (step > args.critic_warmup))
        metrics |= timing | perf_metrics(num_tokens, flops, timing, world)
        log(step, metrics)
        if rank == 0:
            dump_rollouts(run_dir, step, [
                {"prompt": tokenizer.decode(samples[i].prompt_ids), "response": texts[i], "ground_truth": prompts[i]["ground_truth"], "score": scores[i].item(),
                 "finish_reason": samples[i].finish_reason, "response_ids": samples[i].response_ids} for i in range(min(args.dump_rollouts, len(samples)))])
        if state["skipped_steps"] >= args.max_skipped_steps > 0:
            dump_rollouts(run_dir, f"{step}_rank_{rank}_skipped", [
                {"prompt": p["prompt"], "response": t, "response_ids": s.response_ids, "score": x, "advantages": advantages[i:j].tolist(), "old_logp": old_logp[i:j].tolist()}
                for p, t, s, x, i, j in zip(prompts, texts, samples, scores.tolist(), offsets, offsets[1:])])
            unsaved = f"{args.max_skipped_steps} steps in a row had updates that were skipped; their last batch is in {run_dir / 'rollouts'}/step_{step}_rank_*_skipped.jsonl"
            break
        if stopping:
            break

    for s in filter(None, (scorer, cost_scorer)):
        s.close()
    engine.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()
    if unsaved or stopping:
        sys.exit(f"ppo.py: {unsaved}" if unsaved else 128 + stopping)


if __name__ == "__main__":
    try:
        main()
    except torch.OutOfMemoryError as error:
        sys.exit(f"ppo.py: out of GPU memory ({str(error).split('. ')[0]}). Lower --max_tokens_per_micro_batch or --gpu_memory_utilization, "
                 "or set --sleep always, --gradient_checkpointing true, --optimizer_offload true or --offload_policy true.")
