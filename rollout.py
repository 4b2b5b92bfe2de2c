"""Stage 3: prompts -> responses, by an engine that lives in the trainer's process and always holds the trainer's weights.

Two engines behind the same four calls, `generate`, `sleep`, `update_weights` and `shutdown`:

    VLLMEngine   vLLM under torchrun (external launcher): tensor parallel inside groups of ranks, in-place weight updates
    HFEngine     Hugging Face `generate` on a copy of the model: small, no extra package, for CPUs and debugging

Token ids travel, never text. Prompts go in as ids; what was sampled comes back as ids with its length, so nothing is
encoded twice. Sampling is explicit: temperature, top_p and top_k are what the caller says, whatever a model's
generation_config holds; from there only the EOS ids are taken. Every response draws from a seed of its own
(`request_seeds`), so a run repeats itself, on any number of GPUs, as far as the engine's arithmetic does.
"""

import argparse
import contextlib
import dataclasses
import gc
import inspect
import itertools
import math
import os
import re
import signal
import socket
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args, get_origin

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor


@dataclass
class Sample:
    """One response: what the engine sampled, nothing added or cut."""
    prompt_ids: list[int]
    response_ids: list[int]    # with the EOS that ended it
    finish_reason: str         # "stop": it sampled an EOS | "length": it ran into max_tokens
    logp: list[float] | None   # per response token, under the distribution that was sampled from


@dataclass(kw_only=True)
class Sampling:
    """How to sample. temperature 0 is greedy; top_k -1 and top_p 1.0 are off; max_tokens counts response tokens."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 256
    ignore_eos: bool = False   # always max_tokens long: for benchmarks


def request_seeds(seed, step, count):
    """(count,) ints: the seed of every response of a step. It depends on (seed, step, position) only, not on the ranks."""
    return np.random.SeedSequence([seed, step]).generate_state(count, np.uint32).astype(np.int64).tolist()


def eos_token_ids(tokenizer, generation_config):
    """The ids that end a response: the tokenizer's EOS and those of generation_config (chat models have several)."""
    ids = generation_config.eos_token_id if generation_config is not None else None
    ids = ids if isinstance(ids, (list, tuple)) else [ids]
    return sorted({i for i in [*ids, tokenizer.eos_token_id] if i is not None})


# ---------------------------------------------------------------------------------------------------------------------
# Command line and processes of a training script

def parse_args(cls, argv=None):
    """Command line -> cls: one option a field; the comment beside a field is its help. Booleans take true/false."""
    boolean = lambda s: ["false", "true", "0", "1"].index(s.lower()) % 2 == 1  # anything else is the ValueError that argparse expects
    boolean.__name__ = "true/false"
    comments = dict(re.findall(r"^    (\w+): .*?  # (.+)$", inspect.getsource(cls), re.M))
    parser = argparse.ArgumentParser(description=sys.modules[cls.__module__].__doc__.split("\n")[0], usage="%(prog)s [--option value ...]", allow_abbrev=False,
                                     formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=62, width=180))
    for field in dataclasses.fields(cls):
        literal = get_origin(field.type) is Literal
        names = ["--n", "--rollout_n"] if field.name == "n" else [f"--{field.name}"]
        parser.add_argument(*names, dest=field.name, default=field.default, metavar=None if literal else field.type.__name__.upper(),
                            type=boolean if field.type is bool else str if literal else field.type,
                            choices=get_args(field.type) if literal else None, help=f"{comments[field.name]} [{field.default}]".replace("%", "%%"))
    parser.error = lambda message: parser.exit(2, f"{parser.prog}: {message}; --help lists the options\n" if int(os.environ.get("RANK", 0)) == 0 else None)
    return cls(**vars(parser.parse_args(argv)))


def check_common(args, world, bounds, bad=(), odd=()):
    """Refuse options (ValueError) that contradict each other or the number of GPUs, in a sentence that names option and remedy; warn of odd ones.

    Here is what both training scripts ask; they add bounds (low, high, "names of options"), bad and odd ones (condition, sentence).
    """
    mini = args.ppo_mini_batch_size = min(args.ppo_mini_batch_size, args.train_batch_size)
    longest, responses = args.max_prompt_length + args.max_response_length, args.train_batch_size * args.n
    for low, high, names in (
            (1, math.inf, "train_batch_size ppo_mini_batch_size max_prompt_length max_response_length n ppo_epochs val_n max_num_seqs tensor_model_parallel_size kl_horizon"),
            (0, math.inf, "reward_workers seed ref_ema_steps clip_ratio_low clip_ratio_high kl_coef kl_loss_coef"),
            (0, 1, "rollout_logprobs gamma ref_ema_alpha"), (1e-9, 1, "top_p gpu_memory_utilization"), (1e-9, math.inf, "temperature kl_target"), *bounds):
        for name in names.split():
            if not low <= getattr(args, name) <= high:
                raise ValueError(f"--{name} {getattr(args, name)} must be {'at least ' + str(low) if low in (0, 1) else 'above 0'}{'' if high > 1 else ' and at most 1'}")
    for refused, sentence in (
            (args.train_batch_size % mini, f"--train_batch_size {args.train_batch_size} is no multiple of --ppo_mini_batch_size {mini}; change one of them"),
            (mini % world, f"--ppo_mini_batch_size {mini} can't be split over {world} GPUs; take a multiple of {world}"),
            (world % args.tensor_model_parallel_size, f"--tensor_model_parallel_size {args.tensor_model_parallel_size} does not divide the {world} GPUs"),
            (longest > args.max_tokens_per_micro_batch, f"--max_tokens_per_micro_batch {args.max_tokens_per_micro_batch} is below --max_prompt_length + "
             f"--max_response_length = {longest}: a single sample would not fit; raise it"),
            (args.top_k < -1 or args.top_k == 0, f"--top_k {args.top_k} must be -1 (off) or at least 1"),
            (args.clip_ratio_c and args.clip_ratio_c <= 1, f"--clip_ratio_c {args.clip_ratio_c} must be above 1 (or 0 for no dual clip)"),
            (args.kl_ctrl == "adaptive" and 5 * args.kl_horizon <= responses,
             f"--kl_horizon {args.kl_horizon} is too short for the {responses} responses of a step, the coefficient could turn negative: raise it"),
            (unknown := set(args.logger.split(",")) - {"console", "jsonl", "tensorboard", "wandb"},
             f"--logger {args.logger}: unknown {', '.join(sorted(unknown))}; choose from console,jsonl,tensorboard,wandb"), *bad):
        if refused:
            raise ValueError(sentence)
    for doubtful, sentence in (
            (args.top_p < 1 or args.top_k > 0, "training scores with the full softmax, but --top_p/--top_k cut the sampling distribution: the ratio is biased"),
            (args.val_temperature == 0 and args.val_n > 1, f"greedy validation gives {args.val_n} equal responses; using --val_n 1 (set --val_temperature above 0 for pass@k)"),
            (not args.use_kl_loss and args.kl_loss_coef not in (0, type(args).kl_loss_coef), f"--kl_loss_coef {args.kl_loss_coef} does nothing without --use_kl_loss true"),
            (not args.use_kl_in_reward and args.kl_coef not in (0, type(args).kl_coef), f"--kl_coef {args.kl_coef} does nothing without --use_kl_in_reward true"),
            (args.ref_ema_steps and not (args.use_kl_loss or args.use_kl_in_reward), "--ref_ema_steps does nothing without --use_kl_loss or --use_kl_in_reward true"), *odd):
        if doubtful:
            print0(f"warning: {sentence}")
    args.val_n = 1 if args.val_temperature == 0 else args.val_n


@contextlib.contextmanager
def one_sentence():
    """What the user can put right ends the run with a sentence in place of a traceback."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}" if int(os.environ.get("RANK", 0)) == 0 else 2)


def print0(*message):
    if int(os.environ.get("RANK", 0)) == 0:
        print(*message, flush=True)


def init_distributed():
    """torchrun's process group, or one of this process alone; returns (rank, world, device)."""
    if "RANK" not in os.environ:
        with socket.socket() as s:  # a free port
            s.bind(("127.0.0.1", 0))
            os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
                           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(s.getsockname()[1])}
    rank, local_rank, world = (int(os.environ[k]) for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    if torch.cuda.is_available():
        if local_rank >= torch.cuda.device_count():
            raise ValueError(f"rank {rank} finds {torch.cuda.device_count()} GPUs on this node; lower --nproc_per_node of torchrun")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", rank=rank, world_size=world)
    except dist.DistNetworkError as error:
        raise ValueError(f"can't open {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}: another run may hold the port; start torchrun "
                         f"with --standalone or another --master_port ({str(error).splitlines()[0]})") from None
    return rank, world, device


def stop_signals():
    """From now on SIGTERM and SIGINT (Ctrl-C, torchrun's end) let the step finish -> a function for all ranks to call together: the
    signal that any of them got, or 0. A second one, at least two seconds later (torchrun passes Ctrl-C on twice), ends the process at once."""
    got = []

    def note(number, frame):
        if got and time.monotonic() - got[0][1] > 2:
            os._exit(128 + number)
        if not got:
            got.append((number, time.monotonic()))
            print0(f"{signal.Signals(number).name}: finishing the step and saving; once more stops at once")

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)

    def received():
        number = torch.tensor(got[0][0] if got else 0)
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        return int(number)
    return received


def within_memory(accumulate, model, args):
    """accumulate(), which adds up gradients of `model`; out of GPU memory they are dropped and it is called again with half of
    --max_tokens_per_micro_batch. On several ranks the others wait in a collective by then: there it ends the run."""
    while True:
        try:
            return accumulate()
        except torch.OutOfMemoryError:
            if dist.get_world_size() > 1 or args.max_tokens_per_micro_batch < 512 or not hasattr(model, "reset_iter_state"):  # torch 2.13
                raise
        args.max_tokens_per_micro_batch //= 2
        print0(f"warning: out of GPU memory in an update; going on with --max_tokens_per_micro_batch {args.max_tokens_per_micro_batch}")
        model.zero_grad()  # of the whole parameters of layers that were at work
        model.reset_iter_state()
        model.zero_grad()  # of the shards
        torch.cuda.empty_cache()


def all_sum(*values):
    """Sums of numbers over all ranks, as floats."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()


# ---------------------------------------------------------------------------------------------------------------------
# Weights from the trainer

def full_weights(model, dtype, device):
    """Yield (name, whole tensor) of an FSDP2 model, one parameter at a time; a tied weight comes once.

    Cast before gathering: half the bytes on the wire. All ranks must walk through it together.
    """
    if hasattr(model, "reshard"):
        model.reshard()  # after a forward without gradient FSDP2 leaves the root's parameters unsharded
    for name, parameter in model.named_parameters():
        weight = parameter.detach().to(device=device, dtype=dtype)
        yield name, weight.full_tensor() if isinstance(weight, DTensor) else weight


def checksum(tensor):
    """Sum of the bits read as integers: exact, indifferent to order and to rows of zero padding, additive over shards."""
    as_int = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    return int(tensor.detach().contiguous().view(as_int).sum(dtype=torch.int64))


def watched(model):
    """Weights compared after a sync, {name in the engine: name in the trainer}: embedding, head (a tied one by both names),
    the last three and the last down_proj."""
    names = [name for name, _ in model.named_parameters()]
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    first = next(name for name, p in model.named_parameters() if p is embedding)
    pairs = {first: first, "lm_head.weight": first if head is embedding else "lm_head.weight"}
    pairs |= {name: name for name in [*names[-3:], *[n for n in names if n.endswith("down_proj.weight")][-1:]]}
    return pairs


def send_weights(model, dtype, device, load, read):
    """Stream the trainer's weights through load(iterator), then compare checksums with those of read(names) -> {name: checksum}."""
    pairs, sent = watched(model), {}
    def stream():
        for name, weight in full_weights(model, dtype, device):
            if name in pairs.values():
                sent[name] = checksum(weight)
            yield name, weight
    load(stream())
    held = read(list(pairs))
    for name, source in pairs.items():
        if name not in held and name != source:
            continue  # an engine may hold a tied head by the embedding's name only
        if name not in held or held[name] != sent.get(source):
            raise RuntimeError(f"after a weight sync the engine's {name} differs from the trainer's {source}: the engine "
                               "would sample from another policy. Its weight loader doesn't fit this model.")


# ---------------------------------------------------------------------------------------------------------------------
# vLLM

class VLLMEngine:
    """vLLM inside each training process. All ranks must construct and call it together.

    model_path: local directory or hub name. max_model_len: prompt + response tokens. max_num_seqs: sequences decoded at
    once. gpu_memory_utilization: share of the whole GPU for its weights and KV cache; it must be free now, so build the
    engine before the trainer's model. sleep: give that memory back between rollouts. tensor_parallel_size: ranks that
    share one engine; neighbours in rank order form a group and generate each other's prompts. logprobs: share of responses
    that come back with log-probs (they cost the engine time). seed: vLLM's own, beside those of the responses.
    kv_cache_bytes: of the cache, where it is not to be found by measuring what is free. helpers: further engines in processes
    of their own on this rank's GPU (`Helper`), each like this one, which share the prompts: a decode step of many short sequences is
    bound by Python, one thread an engine.
    """

    def __init__(self, model_path, *, dtype, device, max_model_len, max_num_seqs, eos_ids, sleep=False, gpu_memory_utilization=0.4,
                 tensor_parallel_size=1, logprobs=0.0, seed=0, enforce_eager=False, kv_cache_bytes=None, helpers=0):
        self.helpers = [Helper(model_path, dict(dtype=dtype, device=device, max_model_len=max_model_len, max_num_seqs=max_num_seqs, eos_ids=eos_ids,
                                                gpu_memory_utilization=gpu_memory_utilization, logprobs=logprobs, seed=seed, enforce_eager=enforce_eager,
                                                kv_cache_bytes=kv_cache_bytes)) for _ in range(helpers)]  # they start while this one does
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        from vllm import LLM
        rank, self.on_gpu = dist.get_rank(), device.type == "cuda"
        options = {"kv_cache_memory_bytes": kv_cache_bytes} if kv_cache_bytes else {}
        if self.on_gpu:  # without graphs up to the batch size, decoding is bound by kernel launches
            options |= {"gpu_memory_utilization": gpu_memory_utilization, "enable_sleep_mode": sleep, "enforce_eager": enforce_eager,
                        "compilation_config": {"max_cudagraph_capture_size": min(1024, max_num_seqs)}}
        else:
            import vllm._custom_ops as ops
            ops._supports_onednn = False  # oneDNN keeps a packed copy of each weight that an in-place update doesn't reach
            options |= {"kv_cache_memory_bytes": 1 << 30, "enforce_eager": True, "max_num_batched_tokens": max(8192, max_model_len),
                        "enable_chunked_prefill": False}  # a seeded request can't be split there: "CPU Generator does not use offset"
        self.llm = LLM(str(model_path), dtype=dtype, max_model_len=max_model_len, max_num_seqs=max_num_seqs, seed=seed + rank // tensor_parallel_size,
                       distributed_executor_backend="external_launcher", tensor_parallel_size=tensor_parallel_size,
                       logprobs_mode="processed_logprobs", generation_config="vllm", enable_prefix_caching=True, disable_log_stats=True, **options)
        self.dtype, self.device, self.eos_ids, self.sleeps, self.logprobs = dtype, device, eos_ids, sleep and self.on_gpu, logprobs
        self.group = None  # the ranks that share this engine
        if tensor_parallel_size > 1:
            self.group, _ = dist.new_subgroups(tensor_parallel_size, backend="gloo")
        weights = self.llm.apply_model(lambda m: {n: p.data for n, p in m.named_parameters(remove_duplicate=False)})[0] if helpers else None
        for helper in self.helpers:
            helper.call("share", weights)  # this engine's own tensors: what is written into them is there for all

    def generate(self, prompts, sampling, seeds):
        """One response a prompt: list of token-id lists and their seeds -> list of Sample in the same order."""
        parts = np.array_split(np.arange(len(prompts)), 1 + len(self.helpers))  # neighbours, perhaps of one prompt, stay together
        for helper, part in zip(self.helpers, parts[1:]):
            helper.send("generate", [prompts[i] for i in part], sampling, [seeds[i] for i in part])
        samples = self.generate_here([prompts[i] for i in parts[0]], sampling, [seeds[i] for i in parts[0]])
        return samples + [sample for helper in self.helpers for sample in helper.receive()]

    def generate_here(self, prompts, sampling, seeds):
        from vllm import SamplingParams
        everyone = [(prompts, seeds)]
        if self.group is not None:  # the ranks of a TP group run the same engine steps, so all prompts of the group on each
            everyone = [None] * dist.get_world_size(self.group)
            dist.all_gather_object(everyone, (prompts, seeds), group=self.group)
        all_prompts, all_seeds = [p for ps, _ in everyone for p in ps], [s for _, ss in everyone for s in ss]
        every = round(1 / self.logprobs) if self.logprobs else 0  # log-probs of every n-th response: they cost the engine time
        params = [SamplingParams(temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, max_tokens=sampling.max_tokens,
                                 seed=seed, stop_token_ids=[] if sampling.ignore_eos else self.eos_ids, ignore_eos=sampling.ignore_eos,
                                 detokenize=False, logprobs=0 if every and i % every == 0 else None) for i, seed in enumerate(all_seeds)]
        outputs = self.llm.generate([{"prompt_token_ids": p} for p in all_prompts], params, use_tqdm=False) if params else []
        rank = dist.get_rank(self.group) if self.group is not None else 0
        start = sum(len(p) for p, _ in everyone[:rank])
        samples = []
        for output in outputs[start:start + len(prompts)]:
            out = output.outputs[0]
            ids = list(out.token_ids)
            logp = [step[i].logprob for step, i in zip(out.logprobs, ids)] if out.logprobs else None
            samples.append(Sample(list(output.prompt_token_ids), ids, out.finish_reason, logp))
        return samples

    def sleep(self):
        """Give the memory of weights and KV cache back to the trainer; the next update_weights wakes the engine."""
        if self.sleeps:
            self.llm.sleep(level=2)  # level 2 drops the weights too: the next sync brings new ones anyway

    def update_weights(self, model):
        """Put the trainer's weights in place (no copy on disk), forget the prefix cache, compare checksums."""
        if self.sleeps:
            self.llm.wake_up(tags=["weights"])  # first the weights: vLLM restores buffers on the first wake_up
        send_weights(model, self.dtype, self.device, lambda stream: self.llm.apply_model(lambda m: len(m.load_weights(stream))), self.read)
        if self.sleeps:
            self.llm.wake_up(tags=["kv_cache"])
        self.llm.reset_prefix_cache()  # it holds keys and values of the old weights
        if self.on_gpu and self.helpers:
            torch.cuda.synchronize()
        for helper in self.helpers:
            helper.send("copy")
        for helper in self.helpers:
            helper.receive()

    def share(self, weights):
        """In a helper: the first engine's weights, memory of both processes."""
        self.shared = weights

    def copy(self):
        """In a helper: take over what the first engine holds now."""
        def take(m):
            with torch.no_grad():
                for name, parameter in m.named_parameters():
                    parameter.copy_(self.shared[name])
        self.llm.apply_model(take)
        self.llm.reset_prefix_cache()
        if self.on_gpu:
            torch.cuda.synchronize()

    def read(self, names):
        held = self.llm.apply_model(lambda m: {n: p for n, p in m.named_parameters(remove_duplicate=False) if n in names})[0]
        sums = {name: checksum(held[name]) for name in names if name in held}
        if self.group is not None:  # vLLM splits all of these over the group but the norms, which are 1-D
            whole = [None] * dist.get_world_size(self.group)
            dist.all_gather_object(whole, sums, group=self.group)
            sums = {name: sums[name] if held[name].dim() == 1 else sum(part[name] for part in whole) for name in sums}
        return sums

    def shutdown(self):
        """Last call of a run: it takes the process group down with it."""
        for helper in self.helpers:
            helper.process.kill()
        dist.barrier()
        self.llm.llm_engine.engine_core.shutdown()


class Helper:
    """A further VLLMEngine on the same GPU in a process of its own: the same methods, called through a pipe."""

    def __init__(self, model_path, options):
        context = torch.multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, str(model_path), options), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, method, *arguments):
        self.connection.send((method, arguments))

    def receive(self):
        try:
            result = self.connection.recv()
        except EOFError:
            raise RuntimeError(f"a rollout helper process ended with exit code {self.process.exitcode}; its output is above") from None
        if isinstance(result, Exception):
            raise result
        return result

    def call(self, method, *arguments):
        self.send(method, *arguments)
        return self.receive()


def serve(connection, model_path, options):
    """Life of a helper process: an engine of one rank that does what the connection asks, until the trainer is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the trainer decides
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(s.getsockname()[1])}
    if options["device"].type == "cuda":
        torch.cuda.set_device(options["device"])
    dist.init_process_group("cpu:gloo,cuda:nccl" if options["device"].type == "cuda" else "gloo", rank=0, world_size=1)
    try:
        engine = VLLMEngine(model_path, **options)
    except Exception as error:
        connection.recv()
        connection.send(RuntimeError(f"a rollout helper could not start: {error}"))
        raise
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            method, arguments = connection.recv()
            connection.send(getattr(engine, method)(*arguments))


# ---------------------------------------------------------------------------------------------------------------------
# Hugging Face

class HFEngine:
    """`generate` of transformers on a copy of the model, with the token choice made here: explicit and seeded per response.

    max_num_seqs: sequences in one batch. pad_id fills prompts on the left. logprobs: above 0, all responses have them.
    """

    def __init__(self, model_path, *, dtype, device, max_num_seqs, eos_ids, pad_id, logprobs=0.0):
        from transformers import AutoModelForCausalLM, GenerationConfig
        self.model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype, attn_implementation="sdpa").to(device).eval()
        self.model.generation_config = GenerationConfig()  # nothing of the model's own sampling settings may leak in
        self.dtype, self.device, self.max_num_seqs, self.eos_ids, self.pad_id, self.logprobs = dtype, device, max_num_seqs, eos_ids, pad_id, logprobs

    @torch.no_grad()
    def generate(self, prompts, sampling, seeds):
        """One response a prompt: list of token-id lists and their seeds -> list of Sample in the same order."""
        samples = []
        for start in range(0, len(prompts), self.max_num_seqs):
            samples += self.generate_batch(prompts[start:start + self.max_num_seqs], sampling, seeds[start:start + self.max_num_seqs])
        return samples

    def generate_batch(self, prompts, sampling, seeds):
        from transformers import GenerationConfig, LogitsProcessorList
        width = max(len(p) for p in prompts)
        ids = torch.tensor([[self.pad_id] * (width - len(p)) + p for p in prompts], device=self.device)               # (N, width) left-padded
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        uniform = torch.tensor(np.stack([np.random.default_rng(s).random(sampling.max_tokens) for s in seeds]), device=self.device)  # (N, max_tokens)
        logps = []

        def choose(ids, logits):  # a logits processor that leaves one token possible: the sampled one
            logp = filtered_logp(logits.float(), sampling)                                                              # (N, V)
            if sampling.temperature == 0:
                choice = logits.argmax(-1, keepdim=True)
            else:  # inverse of the cumulative distribution at this response's own uniform number
                cdf = logp.double().exp().cumsum(-1)
                u = uniform[:, ids.shape[1] - width, None] * cdf[:, -1:]
                choice = torch.searchsorted(cdf, u, right=True).clamp(max=logits.shape[1] - 1)
            logps.append(logp.gather(1, choice)[:, 0])
            return torch.full_like(logits, -torch.inf).scatter_(1, choice, 0.0)

        config = GenerationConfig(max_new_tokens=sampling.max_tokens, do_sample=False, pad_token_id=self.pad_id,
                                  eos_token_id=None if sampling.ignore_eos else self.eos_ids)
        out = self.model.generate(ids, attention_mask=mask, generation_config=config, logits_processor=LogitsProcessorList([choose]))
        responses, logps = out[:, width:].tolist(), torch.stack(logps, 1).tolist()
        samples = []
        for prompt, response, logp in zip(prompts, responses, logps):
            end = next((t for t, i in enumerate(response) if i in self.eos_ids), None) if not sampling.ignore_eos else None
            length = len(response) if end is None else end + 1
            samples.append(Sample(prompt, response[:length], "length" if end is None else "stop", logp[:length] if self.logprobs else None))
        return samples

    def sleep(self):
        """Nothing to give back: the copy is small or the machine has no GPU."""

    def update_weights(self, model):
        """Copy the trainer's weights in place and compare checksums."""
        held = dict(self.model.named_parameters(remove_duplicate=False))
        def load(stream):
            for name, weight in stream:
                held[name].data.copy_(weight)
        send_weights(model, self.dtype, self.device, load, lambda names: {n: checksum(held[n]) for n in names})

    def shutdown(self):
        gc.collect()


def filtered_logp(logits, sampling):
    """Log-probabilities of the distribution that is sampled from: temperature, then top_k, then top_p.  (N, V) -> (N, V)"""
    logits = logits / (sampling.temperature or 1.0)
    if 0 < sampling.top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(sampling.top_k, -1).values[:, -1:], -torch.inf)
    if sampling.top_p < 1.0:
        values, order = logits.softmax(-1).sort(-1, descending=True)
        drop = values.cumsum(-1) - values >= sampling.top_p      # the token that crosses top_p stays
        logits = logits.masked_fill(drop.scatter(-1, order, drop), -torch.inf)
    return logits.log_softmax(-1)


# ---------------------------------------------------------------------------------------------------------------------
# Engine against trainer: the same weights, not quite the same probabilities

def rejection_rules(args):
    """--rollout_rs and its thresholds -> [(level, statistic, lowest, highest value to keep)]; ValueError if they can't be read."""
    rules, number = [], r"\d*\.?\d+"
    names, thresholds = args.rollout_rs.split(","), args.rollout_rs_threshold.split(",")
    for name, bounds in itertools.zip_longest(names, thresholds, fillvalue="") if args.rollout_rs != "none" else ():
        name = {"token": "token_k1", "sequence": "seq_sum_k1"}.get(name, name)
        if not re.fullmatch(r"(token|seq_sum|seq_mean)_k[123]|seq_max_k[23]", name) or not re.fullmatch(rf"({number}_)?{number}", bounds):
            raise ValueError(f"--rollout_rs {args.rollout_rs} --rollout_rs_threshold {args.rollout_rs_threshold}: can't read {name or 'no statistic'} with "
                             f"{bounds or 'no bounds'}; give as many bounds as statistics, such as token,seq_mean_k3 and 0.5_2.0,0.1")
        *low, high = map(float, bounds.split("_"))
        low = low[0] if low else 1 / high
        rules.append((*name.rsplit("_", 1), *((math.log(low) if low else -math.inf, math.log(high)) if name.endswith("k1") else (-math.inf, high))))
    return rules


def rollout_correction(args, log_ratio, lengths, mask):
    """Against the gap between engine and trainer: weights (R,) for the loss, tokens (R,) to keep, metrics.

    log_ratio (R,): log of trainer's over engine's probability of each token before the update; lengths (N,): tokens of each response;
    mask (R,): tokens with a loss. All bounds are bounds of that ratio (verl's k1 bounds are of its inverse). --rollout_is: importance
    weights truncated from above (https://fengyao.notion.site/off-policy-rl). --rollout_rs: what leaves its bounds is left out, by verl's
    statistics: of a token, or the sum, mean or maximum over its response; k1 the log-ratio, k2 half its square, k3 ratio - 1 - log-ratio.
    """
    size, row, metrics = len(lengths), torch.arange(len(lengths)).repeat_interleave(lengths), {}
    q = torch.where(mask, log_ratio, 0.0)
    by_row = lambda values, reduce: torch.zeros(size, dtype=q.dtype).scatter_reduce(0, row, values, reduce)[row]
    count = by_row(mask.to(q.dtype), "sum").clamp(min=1)
    weights, keep = torch.ones_like(q), mask
    if args.rollout_is != "none":
        weights = (by_row(q, "sum") if args.rollout_is == "sequence" else q).clamp(-20, 20).exp().clamp(max=args.rollout_is_threshold) * mask
        tokens, total, squares = all_sum(mask.sum(), weights.sum(), weights.square().sum())
        metrics = {"rollout/is_mean": total / max(tokens, 1), "rollout/is_eff_sample_size": total**2 / max(tokens * squares, 1e-9)}
        if args.rollout_is_batch_normalize:  # to a mean of 1, over tokens or over responses
            share = mask / (count if args.rollout_is == "sequence" else 1.0)
            total, number = all_sum((weights * share).sum(), share.sum())
            weights = weights * number / max(total, 1e-9)
    for level, kind, low, high in rejection_rules(args):
        value = {"k1": q, "k2": q.square() / 2, "k3": q.expm1() - q}[kind]
        value = {"token": value, "seq_sum": by_row(value, "sum"), "seq_mean": by_row(value, "sum") / count, "seq_max": by_row(value, "amax")}[level]
        keep = keep & (value >= low) & (value <= high)
    if args.rollout_rs != "none":
        before, after = all_sum(mask.sum(), keep.sum())
        metrics["rollout/rs_masked_frac"] = 1 - after / max(before, 1)
    return weights, keep, metrics


# ---------------------------------------------------------------------------------------------------------------------
# From the options of a training script: which engine, what its samples score

def build_engine(args, path, tokenizer, generation_config, device):
    """The rollout engine of --engine, with room for the longest sample."""
    common = dict(dtype=torch.bfloat16 if args.dtype == "bf16" else torch.float32, device=device, max_num_seqs=args.max_num_seqs,
                  eos_ids=eos_token_ids(tokenizer, generation_config), logprobs=args.rollout_logprobs)
    if args.engine == "hf":
        return HFEngine(path, pad_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id, **common)
    count, share, kv_cache_bytes = args.engines_per_gpu, args.gpu_memory_utilization, None
    if count < 1 or count > 1 and (args.sleep == "always" or args.tensor_model_parallel_size > 1):
        raise ValueError(f"--engines_per_gpu {count} must be at least 1; more than one work with --sleep never and --tensor_model_parallel_size 1 only")
    if count > 1 and device.type == "cuda":  # engines that start at the same time can't measure what is free: weights, 3 GiB to work in, the rest is cache
        from transformers import AutoConfig
        share /= count
        kv_cache_bytes = int(share * torch.cuda.get_device_properties(device).total_memory - 2 * count_parameters(AutoConfig.from_pretrained(path)) - 3 * 2**30)
        if kv_cache_bytes < 2**30:
            raise ValueError(f"--engines_per_gpu {count} does not fit into --gpu_memory_utilization {args.gpu_memory_utilization} of the GPU: raise it or take fewer engines")
    try:
        return VLLMEngine(path, max_model_len=args.max_prompt_length + args.max_response_length, sleep=args.sleep == "always", seed=args.seed,
                          gpu_memory_utilization=share, enforce_eager=args.enforce_eager, kv_cache_bytes=kv_cache_bytes, helpers=count - 1,
                          tensor_parallel_size=args.tensor_model_parallel_size, **common)
    except ImportError as error:
        raise ValueError(f"--engine vllm needs the package vllm ({error}); install requirements.txt or take --engine hf") from error
    except (ValueError, RuntimeError) as error:
        if "memory" not in str(error):
            raise
        raise ValueError(f"vLLM does not fit into --gpu_memory_utilization {args.gpu_memory_utilization} of the GPU: raise it, free the GPU, or lower "
                         f"--max_response_length, or raise --tensor_model_parallel_size ({str(error).splitlines()[0]})") from error


def count_parameters(config):
    """Of a causal LM of this config, without making it."""
    from transformers import AutoModelForCausalLM
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())


def must_sleep(args, config, world, trained=1):
    """--sleep auto: would engine and trainer together overfill the GPU? Rough upper estimate of the bytes of `trained` models of this config."""
    parameters = count_parameters(config)
    state = trained * parameters * (16 / world + 2)                                          # fp32 weight, gradient, two moments; gathered bf16
    tokens, hidden = args.max_tokens_per_micro_batch, config.hidden_size
    layer = 2 * hidden if args.gradient_checkpointing else 34 * hidden + 6 * getattr(config, "intermediate_size", 4 * hidden)
    activations = tokens * layer * config.num_hidden_layers + min(tokens, 8192) * config.vocab_size * 14
    total = torch.cuda.get_device_properties(0).total_memory
    return (state + activations) / total + args.gpu_memory_utilization > 0.92


def score(scorer, tokenizer, samples, prompts):
    """Decode and score: the only place where token ids become text. prompts: the row of each sample -> texts, Scores (none without a scorer).

    An id beyond the tokenizer (models pad their vocabulary) decodes to nothing, so the text isn't what was sampled: score 0, no answer.
    """
    texts = tokenizer.batch_decode([s.response_ids for s in samples], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    items = [{"data_source": p["data_source"], "solution_str": t, "ground_truth": p["ground_truth"], "extra_info": p["extra_info"]} for t, p in zip(texts, prompts)]
    scores = scorer.score(items) if scorer else []
    for sample, s in zip(samples, scores):
        if max(sample.response_ids, default=0) >= len(tokenizer) and s.error is None:
            s.score, s.no_answer = 0.0, True
    return texts, scores


def validate(engine, scorer, tokenizer, prompts, args, rank, world, judge=None):
    """Responses to all validation prompts -> {val/<data_source>/acc, .../pass@k}; pass@k is the unbiased estimate (2107.03374).

    judge(samples, prompts) -> (N,) scores of a reward model, whose mean is val/<data_source>/reward_model. scorer may be None then.
    """
    if not prompts:
        return {}
    mine = [p for p in prompts[rank::world] for _ in range(args.val_n)]
    seeds = np.reshape(request_seeds(args.seed, 2**31, len(prompts) * args.val_n), (-1, args.val_n))[rank::world].ravel().tolist()
    sampling = Sampling(temperature=args.val_temperature, max_tokens=args.max_response_length)
    samples = engine.generate([p["prompt_ids"] for p in mine], sampling, seeds)
    scores = [0.0 if math.isnan(s.score) else s.score for s in score(scorer, tokenizer, samples, mine)[1]]
    judged = judge(samples, mine).tolist() if judge else []
    results = [None] * world  # (data source, scores of one prompt by the rules, by the model)
    dist.all_gather_object(results, [(mine[i]["data_source"], scores[i:i + args.val_n], judged[i:i + args.val_n]) for i in range(0, len(mine), args.val_n)])
    by_source = defaultdict(list)
    for source, *values in itertools.chain(*results):
        by_source[source].append(values)
    metrics = {}
    for source, rows in by_source.items():
        groups, judged = zip(*rows)
        if judge:
            metrics[f"val/{source}/reward_model"] = float(np.mean(judged))
        if not scorer:
            continue
        metrics[f"val/{source}/acc"] = float(np.mean(groups))
        k = 2
        while k <= args.val_n:
            metrics[f"val/{source}/pass@{k}"] = float(np.mean([1 - math.comb(args.val_n - c, k) / math.comb(args.val_n, k)
                                                               for c in (sum(v >= 1 for v in g) for g in groups)]))
            k *= 2
    return metrics
