"""Stage 5: the checkpoint format. Save, find, load, and merge to a Hugging Face directory.

    <default_local_dir>/<project_name>/<experiment_name>/
        latest_checkpointed_iteration.txt          N of the newest complete one
        global_step_N/
            actor/  (critic/)                      torch.distributed.checkpoint: weights and optimizer, sharded over ranks
                huggingface/                       config, generation_config, tokenizer and chat template
            rng/rank_R.pt                          random number generators of rank R
            state.json                             what the script wants back (step, coefficients); size and checksum of every file

A checkpoint is complete or absent: written under a temporary name, flushed to disk, renamed, and only then named in
`latest`. It loads on any number of GPUs. Loading runs no code that a file brings (pickle would): see Reader and Planner.

    python merge.py --local_dir checkpoints/gsm8k/grpo/global_step_60/actor --target_dir my_model [--dtype bf16]

writes a directory for `from_pretrained` and `vllm serve`.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pickle
import re
import shutil
import sys
import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from tqdm import tqdm

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SMALL = 2**24  # bytes: files up to this have a checksum in state.json; of larger ones the size must do

# ---------------------------------------------------------------------------------------------------------------------
# Save


def fsync(path):
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def reason_of(error):
    """The error in a line; torch.distributed.checkpoint wraps it in a traceback a rank."""
    error = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


@contextlib.contextmanager
def on_all_ranks(tmp, final):
    """Part of a save that succeeds on all ranks or raises OSError on all; then what was written so far is removed."""
    failure, reason, reasons = None, None, [None] * dist.get_world_size()
    try:
        yield
    except (Exception, CheckpointException) as error:  # tokenizers raises a plain Exception on a full disk, torch a BaseException
        failure, reason = error, f"{reason_of(error)}, {shutil.disk_usage(tmp.parent).free / 1e9:.2f} GB free"
    dist.all_gather_object(reasons, reason)
    if reason := next(filter(None, reasons), None):
        if dist.get_rank() == 0:
            shutil.rmtree(tmp, ignore_errors=True)  # else the disk stays full
        raise OSError(f"can't save {final}, is the disk full? ({reason}) Make room there or set --max_ckpt_to_keep (0 keeps all); "
                      "earlier checkpoints are untouched") from failure


def tidy(run_dir):
    """After a save that was killed: half-written folders go; a checkpoint set aside for one that never came goes back."""
    for torn in run_dir.glob(".tmp_global_step_*"):
        shutil.rmtree(torn)
    for old in run_dir.glob(".old_global_step_*"):
        final = old.with_name(old.name.removeprefix(".old_"))
        shutil.rmtree(old) if final.exists() else os.rename(old, final)


def save_checkpoint(run_dir, step, models, state, tokenizer, max_to_keep=None):
    """Write global_step_<step>. All ranks call it. Killed anywhere, it leaves every earlier checkpoint where it can be found.

    models: {"actor": (FSDP2 model, optimizer or None), ...}. state: JSON dict for the script. max_to_keep: delete older complete
    checkpoints beyond this many, after the new one is whole. Raises OSError (disk full) on all ranks.
    """
    rank, run_dir = dist.get_rank(), Path(run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    final, tmp, old = (run_dir / f"{prefix}global_step_{step}" for prefix in ("", ".tmp_", ".old_"))
    with on_all_ranks(tmp, final):
        if rank == 0:
            tidy(run_dir)
            (tmp / "rng").mkdir(parents=True)
    for name, (model, optimizer) in models.items():
        weights, moments = get_state_dict(model, optimizer or ())
        with on_all_ranks(tmp, final):
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=tmp / name)
    with on_all_ranks(tmp, final):
        rng = {"cpu": torch.get_rng_state()} | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})
        torch.save(rng, tmp / "rng" / f"rank_{rank}.pt")
        for name, (model, _) in models.items() if rank == 0 else ():
            hf = tmp / name / "huggingface"
            model.config.architectures = [type(model).__name__.removeprefix("FSDP")]  # the class that was trained, for merge
            model.config.save_pretrained(hf)
            tokenizer.save_pretrained(hf)
            if getattr(model, "generation_config", None) is not None:  # as text: its own save refuses what some models ship
                (hf / "generation_config.json").write_text(model.generation_config.to_json_string())
    with on_all_ranks(tmp, final):
        if rank == 0:
            files = {str(p.relative_to(tmp)): p for p in sorted(tmp.rglob("*")) if p.is_file()}
            state = state | {"files": {name: p.stat().st_size for name, p in files.items()}}
            sums = {name: zlib.crc32(p.read_bytes()) for name, p in files.items() if state["files"][name] <= SMALL}
            state["crc32"] = sums | {"state.json": zlib.crc32(json.dumps(state).encode())}
            (tmp / "state.json").write_text(json.dumps(state, indent=1))
            latest = run_dir / "latest_checkpointed_iteration.txt"
            latest.with_suffix(".tmp").write_text(str(step))
            for path in [*tmp.rglob("*"), tmp, latest.with_suffix(".tmp")]:
                fsync(path)
            if final.exists():  # from here on nothing needs room on the disk
                os.rename(final, old)
            os.rename(tmp, final)
            fsync(run_dir)
            os.replace(latest.with_suffix(".tmp"), latest)
            fsync(run_dir)
            tidy(run_dir)  # the one set aside
            if max_to_keep:
                earlier = [c for c in list_checkpoints(run_dir) if c[0] <= step]  # later ones: of a run before this one
                whole = [n for n, path in earlier if why_incomplete(path) is None]
                for n, path in earlier:
                    if n < whole[-max_to_keep:][0]:
                        shutil.rmtree(path)


def try_save(run_dir, step, *arguments):
    """save_checkpoint for a run that goes on when the disk is full, as the next save may find room -> None, or what went wrong."""
    try:
        return save_checkpoint(run_dir, step, *arguments)
    except OSError as error:
        if dist.get_rank() == 0:
            print(f"warning: step {step} is not saved: {error}", file=sys.stderr)
        return f"step {step} is not saved: {error}"


# ---------------------------------------------------------------------------------------------------------------------
# Find


def list_checkpoints(run_dir):
    """[(step, path)] of all global_step_N, oldest first; path is .old_global_step_N where a save was killed between two renames."""
    found = {}
    for pattern in (".old_global_step_*", "global_step_*"):
        found |= {int(p.name.split("_")[-1]): p for p in Path(run_dir).glob(pattern) if p.name.split("_")[-1].isdigit()}
    return sorted(found.items())


def why_incomplete(path):
    """None for a whole checkpoint, else the reason in a few words."""
    path = Path(path)
    if not (path / "state.json").is_file():
        return "state.json is missing"
    try:
        state = json.loads((path / "state.json").read_text())
        sums = state.pop("crc32")
        if sums.pop("state.json") != zlib.crc32(json.dumps(state).encode()):
            return "state.json was changed"
    except (ValueError, KeyError, TypeError, AttributeError):
        return "state.json is torn"
    for name, size in state["files"].items():
        if not (path / name).is_file() or (path / name).stat().st_size != size:
            return f"{name} is missing or has another size"
        if name in sums and zlib.crc32((path / name).read_bytes()) != sums[name]:
            return f"{name} was changed"
    return None


def find_checkpoint(run_dir, resume_mode="auto"):
    """The checkpoint to resume from, or None.

    resume_mode: "auto" takes the newest whole one of run_dir (a torn one is named and skipped), "disable" none, a path
    that one. Raises ValueError when the named one isn't a whole checkpoint.
    """
    if resume_mode == "disable":
        return None
    if resume_mode != "auto":
        if reason := why_incomplete(resume_mode):
            raise ValueError(f"--resume_mode {resume_mode} can't be resumed: {reason}; give a .../global_step_N folder, auto or disable")
        return Path(resume_mode)
    latest = Path(run_dir) / "latest_checkpointed_iteration.txt"
    try:
        newest = int(latest.read_text())  # later ones are of a run before this one
    except (FileNotFoundError, ValueError):
        newest = float("inf")
    for _, path in reversed([c for c in list_checkpoints(run_dir) if c[0] <= newest]):
        if (reason := why_incomplete(path)) is None:
            return path
        print(f"warning: skipping checkpoint {path}: {reason}", file=sys.stderr)
    return None


# ---------------------------------------------------------------------------------------------------------------------
# Load

METADATA = {  # module: names that torch.distributed.checkpoint writes into .metadata
    "pathlib": {"PosixPath"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {"BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
                                              "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"}}


class MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module, name):
        if name not in METADATA.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} has no place in .metadata")
        return super().find_class(module, name)


class Reader(dcp.FileSystemReader):
    def read_metadata(self, *args, **kwargs):
        with open(Path(self.path) / ".metadata", "rb") as file:
            MetadataUnpickler(file).load()  # first: torch's own pickle.load runs whatever the file names
        return super().read_metadata(*args, **kwargs)


class Planner(dcp.DefaultLoadPlanner):
    def load_bytes(self, read_item, value):
        try:
            torch.load(value, weights_only=True)  # first: torch's own loads the optimizer's settings with weights_only=False
        except pickle.UnpicklingError as error:  # whose advice is to switch weights_only off
            raise ValueError(f"{read_item.dest_index.fqn} is neither number nor text") from error
        value.seek(0)
        super().load_bytes(read_item, value)


def read_sharded(path, weights):
    """Fill a nested dict of tensors in place from a folder that dcp.save wrote. ValueError if it can't be read."""
    try:
        dcp.load(weights, storage_reader=Reader(path), planner=Planner())
    except CheckpointException as error:
        raise ValueError(f"{path} can't be loaded ({reason_of(error)}); take another global_step_N or the model it was saved from") from error


def load_checkpoint(path, models):
    """Load weights and optimizer in place, restore this rank's random number generators; returns the saved state dict."""
    path = Path(path)
    for name, (model, optimizer) in models.items():
        weights, moments = get_state_dict(model, optimizer or ())
        read_sharded(path / name, {"model": weights, "optimizer": moments})
        set_state_dict(model, optimizer or (), model_state_dict=weights, optim_state_dict=moments)
    rng_file = path / "rng" / f"rank_{dist.get_rank()}.pt"
    if rng_file.exists():  # absent when there are more ranks than when it was saved
        rng = torch.load(rng_file, weights_only=True)
        torch.set_rng_state(rng["cpu"])
        if "cuda" in rng and torch.cuda.is_available():
            torch.cuda.set_rng_state(rng["cuda"])
    return json.loads((path / "state.json").read_text())


@contextlib.contextmanager
def timer(timing, name):
    """Add the seconds of a block to timing["timing/<name>"], GPU work included."""
    start = time.perf_counter()
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    timing[f"timing/{name}"] += time.perf_counter() - start


def stats(name, values):
    """{name/mean, name/max, name/min} of a tensor over all ranks; 0 for nothing."""
    values = values.detach().double().cpu()
    sums = torch.tensor([len(values), values.sum()], dtype=torch.float64)
    ends = torch.tensor([values.max(), -values.min()] if len(values) else [-torch.inf, -torch.inf], dtype=torch.float64)
    dist.all_reduce(sums)
    dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    mean, high, low = [float(sums[1] / sums[0]), float(ends[0]), -float(ends[1])] if sums[0] else [0.0, 0.0, 0.0]
    return {f"{name}/mean": mean, f"{name}/max": high, f"{name}/min": low}


PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "H800": 989e12, "A100": 312e12, "A800": 312e12, "L40S": 362e12, "4090": 165e12, "B200": 2250e12}  # dense bf16


def perf_metrics(tokens, flops, timing, world):
    """Speed and memory of a step: tokens of all ranks (prompts included), flops of the updates, timing with timing/step and timing/update_*."""
    metrics = {"perf/total_num_tokens": tokens, "perf/throughput": tokens / timing["timing/step"] / world}
    if torch.cuda.is_available():
        metrics["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / 2**30
        if peak := next((v for k, v in PEAK_FLOPS.items() if k in torch.cuda.get_device_name()), None):
            metrics["perf/mfu"] = flops / sum(v for k, v in timing.items() if k.startswith("timing/update")) / world / peak
    return metrics


ALARMS = (  # metric, when it is odd (its value, its value in the first step), what to try
    ("rollout/probs_diff_mean", lambda v, first: v > 0.01, "engine and trainer give tokens other probabilities; look at --dtype, --top_p and --top_k, or correct with grpo.py's --rollout_is token"),
    ("actor/ppo_kl", lambda v, first: abs(v) > 0.3, "the policy moves far within a step; lower --lr or --ppo_epochs"),
    ("actor/reward_kl_penalty", lambda v, first: v > 1, "the policy is far from the reference; raise --kl_coef or lower --lr"),
    ("actor/kl_loss", lambda v, first: v > 1, "the policy is far from the reference; raise --kl_loss_coef or lower --lr"),
    ("actor/entropy", lambda v, first: v < 0.03 * first, "the policy has all but stopped exploring; lower --lr, raise --entropy_coeff or --clip_ratio_high"),
    ("actor/entropy", lambda v, first: v > 3 * first + 0.1, "the policy falls apart; lower --lr or --entropy_coeff, or add a KL"),
    ("reward/error_frac", lambda v, first: v > 0.05, "the reward function fails or runs out of time; try it on rollouts/step_N.jsonl, or raise --reward_timeout"),
    ("reward/no_answer_frac", lambda v, first: v > 0.9, "hardly any response has an answer that the reward reads; look at rollouts/step_N.jsonl, then try another --reward_fn"),
    ("critic/constant_groups_frac", lambda v, first: v == 1, "no group has two different scores, so nothing was learned; take easier or harder prompts, a larger --n or a higher --temperature"),
    ("response_length/clip_ratio", lambda v, first: v > 0.5, "most responses were cut; raise --max_response_length"))


def make_logger(args, run_dir, start_step):
    """log(step, metrics) to what --logger names, and the first time a metric is odd (ALARMS) a warning. After a resume, rows of
    metrics.jsonl beyond start_step are dropped."""
    first, warned = {}, set()
    loggers, path = args.logger.split(","), run_dir / "metrics.jsonl"
    if "jsonl" in loggers:
        rows = path.read_text().splitlines() if path.exists() and start_step else []
        kept = [r + "\n" for r in rows if r.endswith("}") and json.loads(r)["step"] <= start_step]  # a kill may leave half a row
        path.with_suffix(".tmp").write_text("".join(kept))
        os.replace(path.with_suffix(".tmp"), path)  # a kill here loses no row
    if "tensorboard" in loggers:
        from torch.utils.tensorboard import SummaryWriter
        writer = SummaryWriter(run_dir / "tensorboard", purge_step=start_step + 1)
    if "wandb" in loggers:
        import wandb
        wandb.init(project=args.project_name, name=args.experiment_name, id=re.sub(r"\W", "-", f"{args.project_name}-{args.experiment_name}"),
                   dir=run_dir, resume="allow" if start_step else None, config=dataclasses.asdict(args))

    def log(step, metrics):
        if "console" in loggers:
            tqdm.write(f"step:{step} - " + " - ".join(f"{k}:{v:.3e}" if v and abs(v) < 1e-3 else f"{k}:{v:.3f}" for k, v in metrics.items()))
            sys.stdout.flush()
        if "jsonl" in loggers:
            with path.open("a") as f:
                f.write(json.dumps({"step": step, **metrics}) + "\n")
        if "tensorboard" in loggers:
            for key, value in metrics.items():
                writer.add_scalar(key, value, step)
            writer.flush()
        if "wandb" in loggers:
            wandb.log(metrics, step=step)
        for alarm in ALARMS:
            key, odd, remedy = alarm
            if key in metrics and alarm not in warned and odd(metrics[key], first.setdefault(key, metrics[key])):
                warned.add(alarm)
                tqdm.write(f"warning: step {step}: {key} is {metrics[key]:.3g}: {remedy}", file=sys.stderr)
    return log


def dump_rollouts(run_dir, step, rows):
    """rollouts/step_N.jsonl, one JSON object a response."""
    if not rows:
        return
    (run_dir / "rollouts").mkdir(exist_ok=True)
    with (run_dir / "rollouts" / f"step_{step}.jsonl").open("w") as f:
        f.writelines(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)


def merge(local_dir, target_dir, dtype="bf16"):
    """Gather a sharded actor or critic and write it as a Hugging Face directory: weights, config, tokenizer, chat template.

    local_dir: .../global_step_N/actor. dtype: bf16, fp16 or fp32 of the written weights. One process, no GPU, any world size.
    """
    import transformers
    from transformers import AutoConfig, AutoTokenizer
    local_dir, hf = Path(local_dir), Path(local_dir) / "huggingface"
    if not (local_dir / ".metadata").is_file() or not hf.is_dir():
        raise FileNotFoundError(f"--local_dir {local_dir} holds no checkpoint; give a .../global_step_N/actor folder")
    if reason := why_incomplete(local_dir.parent):
        raise ValueError(f"{local_dir.parent} is not a whole checkpoint: {reason}; take an earlier global_step_N")
    config = AutoConfig.from_pretrained(hf)
    model = getattr(transformers, config.architectures[0])._from_config(config, dtype=torch.float32)
    weights = model.state_dict()
    read_sharded(local_dir, {"model": weights})
    model.load_state_dict(weights)
    model.to(DTYPES[dtype])
    model.save_pretrained(target_dir)  # writes a tied weight once, and the dtype into config.json
    AutoTokenizer.from_pretrained(hf).save_pretrained(target_dir)
    if (hf / "generation_config.json").exists():
        shutil.copy(hf / "generation_config.json", target_dir)
    print(f"merged {local_dir} -> {target_dir} ({dtype})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Merge a sharded checkpoint into a Hugging Face directory.")
    parser.add_argument("--local_dir", required=True, help="checkpoints/<project>/<experiment>/global_step_N/actor")
    parser.add_argument("--target_dir", required=True, help="where the Hugging Face directory is written")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the written weights")
    args = parser.parse_args()
    try:
        merge(args.local_dir, args.target_dir, args.dtype)
    except (FileNotFoundError, ValueError) as error:
        sys.exit(f"merge.py: {error}")
