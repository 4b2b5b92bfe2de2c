"""Stage 5: the checkpoint format. Save, find, load, and merge to a Hugging Face directory.

    <default_local_dir>/<project_name>/<experiment_name>/
        latest_checkpointed_iteration.txt          N of the newest complete one
        global_step_N/
            actor/  (critic/)                      torch.distributed.checkpoint: weights and optimizer, sharded over ranks
                huggingface/                       config, generation_config, tokenizer and chat template
            rng/rank_R.pt                          random number generators of rank R
            state.json                             what the script wants back (step, coefficients) and the size of every file

A checkpoint is complete or absent: written under a temporary name, flushed to disk, renamed, and only then named in
`latest`. It loads on any number of GPUs. Nothing is unpickled (safetensors, torch.distributed.checkpoint, weights_only).

    python merge.py --local_dir checkpoints/gsm8k/grpo/global_step_60/actor --target_dir my_model [--dtype bf16]

writes a directory for `from_pretrained` and `vllm serve`.
"""

import argparse
import dataclasses
import json
import os
import re
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from tqdm import tqdm

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def fsync(path):
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def save_checkpoint(run_dir, step, models, state, tokenizer, max_to_keep=None):
    """Write global_step_<step>. All ranks call it.

    models: {"actor": (FSDP2 model, optimizer), ...}. state: JSON dict for the script. max_to_keep: delete older complete
    checkpoints beyond this many, after the new one is whole. Raises OSError (disk full) with the earlier ones intact.
    """
    rank, final = dist.get_rank(), Path(run_dir) / f"global_step_{step}"
    tmp = final.with_name(f".tmp_{final.name}")
    if rank == 0:
        for torn in Path(run_dir).glob(".tmp_global_step_*"):  # of a save that was killed
            shutil.rmtree(torn)
        (tmp / "rng").mkdir(parents=True)
    dist.barrier()
    for name, (model, optimizer) in models.items():
        weights, moments = get_state_dict(model, optimizer)
        try:
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=tmp / name)
        except CheckpointException as error:  # a BaseException, with a traceback a rank; after a failed write a message of zip offsets
            if rank == 0:
                shutil.rmtree(tmp, ignore_errors=True)  # else the disk stays full
            reason = next(iter(error.failures.values()))[0]
            raise OSError(f"can't write {tmp / name}, is the disk full? ({reason})") from error
        if rank == 0:
            hf = tmp / name / "huggingface"
            model.config.architectures = [type(model).__name__.removeprefix("FSDP")]  # the class that was trained, for merge
            model.config.save_pretrained(hf)
            tokenizer.save_pretrained(hf)
            if getattr(model, "generation_config", None) is not None:  # as text: its own save refuses what some models ship
                (hf / "generation_config.json").write_text(model.generation_config.to_json_string())
    rng = {"cpu": torch.get_rng_state()} | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})
    torch.save(rng, tmp / "rng" / f"rank_{rank}.pt")
    dist.barrier()
    if rank == 0:
        files = sorted(p for p in tmp.rglob("*") if p.is_file())
        state = state | {"files": {str(p.relative_to(tmp)): p.stat().st_size for p in files}}
        (tmp / "state.json").write_text(json.dumps(state, indent=1))
        for path in [*files, tmp / "state.json", *(p for p in tmp.rglob("*") if p.is_dir()), tmp]:
            fsync(path)
        shutil.rmtree(final, ignore_errors=True)
        os.rename(tmp, final)
        latest = Path(run_dir) / "latest_checkpointed_iteration.txt"
        latest.with_suffix(".tmp").write_text(str(step))
        fsync(latest.with_suffix(".tmp"))
        os.replace(latest.with_suffix(".tmp"), latest)
        fsync(run_dir)
        if max_to_keep:
            for _, old in [c for c in list_checkpoints(run_dir) if c[0] <= step][:-max_to_keep]:  # later ones: of a run before this one
                shutil.rmtree(old)
    dist.barrier()


def list_checkpoints(run_dir):
    """[(step, path)] of all global_step_N, oldest first."""
    found = [p for p in Path(run_dir).glob("global_step_*") if p.name.split("_")[-1].isdigit()]
    return sorted((int(p.name.split("_")[-1]), p) for p in found)


def why_incomplete(path):
    """None for a whole checkpoint, else the reason in a few words."""
    if not (Path(path) / "state.json").is_file():
        return "state.json is missing"
    try:
        files = json.loads((Path(path) / "state.json").read_text())["files"]
    except (json.JSONDecodeError, KeyError):
        return "state.json is torn"
    bad = [f for f, size in files.items() if not (Path(path) / f).is_file() or (Path(path) / f).stat().st_size != size]
    return f"{bad[0]} is missing or has another size" if bad else None


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
    newest = int(latest.read_text()) if latest.is_file() else float("inf")  # later ones are of a run before this one
    for _, path in reversed([c for c in list_checkpoints(run_dir) if c[0] <= newest]):
        if (reason := why_incomplete(path)) is None:
            return path
        print(f"warning: skipping checkpoint {path}: {reason}", file=sys.stderr)
    return None


def load_checkpoint(path, models):
    """Load weights and optimizer in place, restore this rank's random number generators; returns the saved state dict."""
    path = Path(path)
    for name, (model, optimizer) in models.items():
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=path / name)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    rng_file = path / "rng" / f"rank_{dist.get_rank()}.pt"
    if rng_file.exists():  # absent when there are more ranks than when it was saved
        rng = torch.load(rng_file, weights_only=True)
        torch.set_rng_state(rng["cpu"])
        if "cuda" in rng and torch.cuda.is_available():
            torch.cuda.set_rng_state(rng["cuda"])
    return json.loads((path / "state.json").read_text())


def make_logger(args, run_dir, start_step):
    """log(step, metrics) to what --logger names. After a resume, rows of metrics.jsonl beyond start_step are dropped."""
    loggers, path = args.logger.split(","), run_dir / "metrics.jsonl"
    if "jsonl" in loggers:
        rows = path.read_text().splitlines() if path.exists() and start_step else []
        path.write_text("".join(r + "\n" for r in rows if r.endswith("}") and json.loads(r)["step"] <= start_step))  # a kill may leave half a row
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
    return log


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
    dcp.load({"model": weights}, checkpoint_id=local_dir)
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
