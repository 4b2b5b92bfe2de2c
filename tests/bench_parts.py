"""Parts of a training step, each measured in a process of its own with the project's functions; bench.py calls it and reads the JSON lines.

    python tests/bench_parts.py FUNCTION '{"results": "FILE", "model": "DIR", ...}'

A function takes s, the settings, and emit, which writes a line of results: what=, kind=, seconds=[...], perhaps tokens= and flops=.
"""

import functools
import json
import shutil
import sys
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


class Stopwatch:
    """Seconds inside watched calls, {name: seconds}, without those of watched calls inside them. GPU work is waited for."""

    def __init__(self):
        self.spent, self.inside = defaultdict(float), []

    def now(self):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def watch(self, owner, method, name):
        call = getattr(owner, method)
        @functools.wraps(call)
        def timed(*args, **kwargs):
            started = self.now()
            self.inside.append(0.0)
            try:
                return call(*args, **kwargs)
            finally:
                seconds = self.now() - started
                self.spent[name] += seconds - self.inside.pop()
                if self.inside:
                    self.inside[-1] += seconds
        setattr(owner, method, timed)

    def seconds_of(self, work, repeats, warmup=1):
        """Seconds of each call of work()."""
        times = [(self.now(), work(), self.now()) for _ in range(warmup + repeats)]
        return [end - start for start, _, end in times[warmup:]]


def make_model(s, emit):
    """Random weights of a shape, bf16, with a tokenizer that has fewer ids."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config
    hidden, intermediate, layers, heads, kv_heads, vocab, tied = s.shape
    tokenizer, partial = AutoTokenizer.from_pretrained(s.tokenizer), Path(s.path + ".tmp")
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(Qwen2Config(
            vocab_size=max(vocab, len(tokenizer)), hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
            max_position_embeddings=32768, rope_theta=1e6, rms_norm_eps=1e-6, tie_word_embeddings=tied, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id), dtype=torch.bfloat16)
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(s.path)


def matmul(s, emit):
    n, count = (8192, 20) if not s.tiny else (512, 2)
    a, b = (torch.randn(n, n, device="cuda" if torch.cuda.is_available() else "cpu", dtype=torch.bfloat16) for _ in range(2))
    emit(what=f"bf16 {n} x {n} x {n}, random", kind="matmul", seconds=[t / count for t in Stopwatch().seconds_of(lambda: [a @ b for _ in range(count)], 5, 2)], flops=2 * n**3)


def start(s, **options):
    """Processes, and grpo.py's Args as its setup() leaves them."""
    import grpo
    from transformers import AutoTokenizer
    *_, device = grpo.init_distributed()
    dtype, compile_ = ("bf16", "true") if device.type == "cuda" else ("fp32", "false")
    return grpo, grpo.Args(model_path=s.model, engine=s.engine, dtype=dtype, compile=compile_, **options), AutoTokenizer.from_pretrained(s.model), device


def update(s, emit):
    """Sections 3 and 5 of grpo.py's loop on random sequences as long as GSM8K's: one optimizer step over all of them, and log-probs alone."""
    from rollout import Sample
    grpo, args, _, device = start(s)
    (count, scale), random, clock = (256, 1) if not s.tiny else (8, 16), torch.Generator().manual_seed(0), Stopwatch()
    ids = lambda low, high: torch.randint(0, 500, (int(torch.randint(low // scale, high // scale + 1, (), generator=random)),), generator=random).tolist()
    samples = [Sample(ids(64, 144), ids(104, 256), "length", None) for _ in range(count)]
    lengths = torch.tensor([len(x.response_ids) for x in samples])
    tokens, offsets = sum(len(x.prompt_ids) + len(x.response_ids) for x in samples), [0, *lengths.cumsum(0).tolist()]
    model = grpo.load_model(s.model, args, device)
    parameters = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay, betas=(0.9, 0.999), fused=device.type == "cuda")
    row = torch.arange(count).repeat_interleave(lengths)                                                        # (R,)
    batch = {"advantages": torch.randn(count, generator=random)[row], "row": row, "mask": row >= 0, "weights": torch.ones(len(row))}
    batch = {key: value.to(device) for key, value in batch.items()}

    def step():
        for micro in grpo.micro_batches(samples, range(count), args.max_tokens_per_micro_batch):
            inputs, labels = grpo.pack([samples[i] for i in micro], device)
            flat = grpo.flat_rows(offsets, micro).to(device)
            logp, _ = model.token_logprobs(inputs, labels, args.temperature)
            loss, _ = grpo.policy_loss(args, logp, logp.detach(), **{key: value[flat] for key, value in batch.items()})
            (loss.sum() / len(row)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm).full_tensor()
        if torch.isfinite(norm):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    works = {"update": (step, 6), "log-probs": (lambda: grpo.batch_logprobs(model, samples, offsets, args, device), 2)}
    for budget, chunk in ((16384, grpo.HEAD_CHUNK), (32768, grpo.HEAD_CHUNK), (32768, 32768), (65536, grpo.HEAD_CHUNK)):
        args.max_tokens_per_micro_batch, grpo.HEAD_CHUNK = max(budget // scale, 512), chunk
        for name, (work, per_token) in works.items():
            line = dict(what=f"{name}, {budget} tokens a micro-batch, logits of {chunk}", kind=name, tokens=tokens, flops=per_token * parameters * tokens, response_tokens=len(row), seconds=[])
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            try:
                line["seconds"] = clock.seconds_of(work, s.steps, s.warmup + 1)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
            emit(**line, allocated_gib=torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None)


def rate(s, emit, what, kind, generate, length=256):
    """Measure generate(prompts, tokens a response) -> tokens. 1024 fresh random prompts of 80 to 180 tokens: an engine must not find them in its prefix cache."""
    (count, scale), random, tokens = (1024, 1) if not s.tiny else (16, 16), np.random.default_rng(0), []
    def work(length=length // scale):
        tokens.append(generate([random.integers(0, 100, random.integers(80 // scale, 180 // scale)).tolist() for _ in range(count)], length))
    work(8)
    emit(what=what, kind=kind, seconds=Stopwatch().seconds_of(work, min(3, s.steps), 0), tokens=tokens[-1])


def generate(s, emit):
    """Through rollout.py: so many engines, then fewer of them; also without a seed a response, and without the share of log-probs that the scripts ask for."""
    from rollout import Sampling, build_engine
    _, args, tokenizer, device = start(s, engines_per_gpu=s.engines, gpu_memory_utilization=0.5, sleep="never", max_prompt_length=192)
    engine = build_engine(args, s.model, tokenizer, None, device)
    helpers = getattr(engine, "helpers", [])
    def run(prompts, length, seed=lambda i: i):
        return sum(len(x.response_ids) for x in engine.generate(prompts, Sampling(max_tokens=length, ignore_eos=True), [seed(i) for i in range(len(prompts))]))
    unseeded = functools.partial(run, seed=lambda i: None)
    for count in range(s.engines, 0, -1):
        engine.helpers = helpers[:count - 1]
        rate(s, emit, f"ours, engines: {count}", "ours", run)
        if s.engine == "vllm" and count in (s.engines, 1):
            rate(s, emit, f"ours, engines: {count}, no seeds", "unseeded", unseeded)
    engine.helpers = helpers
    if s.engine == "vllm":
        engine.logprobs = 0.0
        for helper in helpers:
            helper.call("__setattr__", "logprobs", 0.0)
        rate(s, emit, f"ours, engines: {s.engines}, no log-probs", "ours", run)
        rate(s, emit, f"ours, engines: {s.engines}, neither", "unseeded", unseeded)
    engine.shutdown()


def stock(s, emit):
    """vLLM itself, by default or with CUDA graphs up to so many sequences."""
    from vllm import LLM, SamplingParams
    options = {"gpu_memory_utilization": 0.5} if torch.cuda.is_available() else {"enforce_eager": True, "kv_cache_memory_bytes": 2**30}
    llm = LLM(s.model, max_model_len=512, **options | ({"compilation_config": {"max_cudagraph_capture_size": s.graphs}} if s.graphs and torch.cuda.is_available() else {}))
    rate(s, emit, "stock vLLM, " + (f"CUDA graphs to {s.graphs} sequences" if s.graphs else "defaults"), "stock", lambda prompts, length: sum(len(x.outputs[0].token_ids) for x in llm.generate(
        [{"prompt_token_ids": p} for p in prompts], SamplingParams(max_tokens=length, ignore_eos=True), use_tqdm=False)))


def sync(s, emit):
    """The trainer's weights to the engine as grpo.py does it; an engine that sleeps gives its memory back before and takes it again."""
    from rollout import build_engine
    grpo, args, tokenizer, device = start(s, engines_per_gpu=s.engines, sleep=s.sleep)
    engine, clock = build_engine(args, s.model, tokenizer, None, device), Stopwatch()
    engine.sleep()
    model = grpo.load_model(s.model, args, device)
    engine.update_weights(model)
    helpers = getattr(engine, "helpers", [])
    for count in sorted({s.engines, 1}, reverse=True):
        engine.helpers = helpers[:count - 1]
        down, up = [], []
        for _ in range(1 + s.steps):
            down += clock.seconds_of(engine.sleep, 1, 0)
            if device.type == "cuda" and s.sleep == "always":
                torch.cuda.empty_cache()
            up += clock.seconds_of(lambda: engine.update_weights(model), 1, 0)
        if s.sleep == "always":
            emit(what="sleep", kind="sleep", seconds=down[1:])
        emit(what=("wake and sync" if s.sleep == "always" else "sync") + f", engines: {count}", kind="wake" if s.sleep == "always" else "sync", engines=count, seconds=up[1:])
    engine.helpers = helpers
    engine.shutdown()


def demo(s, emit):
    """run.sh's CPU demo with a watch on the model: in the rollout, and in the update with backward, clipping and optimizer."""
    import grpo
    import transformers
    clock = Stopwatch()
    for owner, method, name in ((grpo, "token_logprobs", "train"), (torch.Tensor, "backward", "train"), (torch.nn.utils, "clip_grad_norm_", "train"), (torch.optim.AdamW, "step", "train"),
                                (transformers.LlamaForCausalLM, "forward", "decode"), (transformers.GenerationMixin, "generate", "around decode")):
        clock.watch(owner, method, name)
    sys.argv = ["grpo.py", *(f"--train_files {s.demo}/train.parquet --model_path {s.demo}/model --engine hf --train_batch_size 64 --ppo_mini_batch_size 16 --n 8 --max_prompt_length 32 "
                             f"--max_response_length 16 --max_tokens_per_micro_batch 4096 --lr 3e-4 --lr_scheduler_type linear --warmup_steps 10 --clip_ratio_high 0.28 "
                             f"--total_training_steps {s.warmup + 2 * s.steps} --val_before_train false --test_freq 0 --save_freq 0 --resume_mode disable --project_name bench "
                             f"--experiment_name demo --default_local_dir {Path(s.results).parent}").split(), "--val_files", ""]
    grpo.main()
    rows = [json.loads(line) for line in (Path(s.results).parent / "bench/demo/metrics.jsonl").read_text().splitlines()]
    for row in rows:
        emit(**row)
    total = sum(row["timing/step"] for row in rows)
    emit(what="demo, all steps", kind="demo", seconds=[total], **{name: seconds / total for name, seconds in clock.spent.items()})


if __name__ == "__main__":
    settings = SimpleNamespace(**json.loads(sys.argv[2]))
    def emit(**line):
        with open(settings.results, "a") as file:
            file.write(json.dumps(line) + "\n")
    globals()[sys.argv[1]](settings, emit)
