#!/usr/bin/env bash
# Every ALGO on the CPU demo, JOBS at a time with one thread each, and a table of what it did to accuracy on held-out sums.
#
#   JOBS=8 bash tests/learn_all.sh [algorithms, default all]        OUT, SEED and STEPS (default: run.sh's) are further settings
set -euo pipefail
here=$(cd "$(dirname "$0")/.." && pwd)
export GPU=0 SEED=${SEED:-0} OUT=${OUT:-/tmp/learn_all} OMP_NUM_THREADS=1 PROJECT=learn_all DATA=${DATA:-} MODEL=${MODEL:-}
[ $# -gt 0 ] || set -- grpo dr_grpo dapo gspo rloo reinforce_pp reinforce_pp_baseline remax opo gpg passk cispo gmpo sapo clip_cov kl_cov
DATA=${DATA:-$OUT/demo-$SEED}
MODEL=${MODEL:-$DATA/model}
mkdir -p "$OUT"
[ -f "$DATA/train.parquet" ] || bash "$here/run.sh" data
printf '%s\n' "$@" | xargs -P "${JOBS:-2}" -I{} bash -c \
  'ALGO={} bash "$0/run.sh" train -- ${STEPS:+--total_training_steps $STEPS} --save_freq 0 --logger jsonl --resume_mode disable > "$OUT/{}.log" 2>&1 || echo "{} failed: $OUT/{}.log" >&2' "$here"
python3 - "$OUT/$PROJECT" "$SEED" "$@" <<'PY'
import json, pathlib, sys
folder, seed, *algorithms = sys.argv[1:]
print("| ALGO | before | after | best | training reward | seconds a step |\n|---|---|---|---|---|---|")
for name in algorithms:
    path = pathlib.Path(folder, f"{name}-{seed}", "metrics.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    accuracy = [r["val/demo/arithmetic/acc"] for r in rows if "val/demo/arithmetic/acc" in r]
    steps = [r for r in rows if "critic/score/mean" in r]
    if len(accuracy) < 2:
        print(f"| {name} | failed | | | | |")
        continue
    reward = [r.get("training/sampled_score_mean", r["critic/score/mean"]) for r in steps]
    print(f"| {name} | {accuracy[0]:.1%} | **{accuracy[-1]:.1%}** | {max(accuracy):.1%} | {reward[0]:.3f} -> {sum(reward[-5:]) / len(reward[-5:]):.3f} "
          f"| {sorted(r['timing/step'] for r in steps)[len(steps) // 2]:.2f} |")
PY
