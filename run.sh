#!/usr/bin/env bash
# Every stage in one command:   bash run.sh [setup|data|train|merge|summary|test]   [-- options of the training script]
#
#   bash run.sh                                   install, data, train with validation before and after, merge, summary
#   MODEL=Qwen/Qwen2.5-1.5B-Instruct NGPU=4 bash run.sh -- --lr 5e-7 --n 16
#   bash run.sh test                              install and run the tests
#
# With a GPU: GSM8K and Qwen2.5-0.5B-Instruct from the hub (USE_MODELSCOPE=1: from ModelScope), vLLM, all GPUs of the node.
# Without: sums and a 0.6M-parameter model made on the spot, Hugging Face engine; some minutes on 2 cores, no hub needed.
# An interrupted run goes on from its newest checkpoint when the same command is given again.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
stage=all; case "${1:-}" in setup|data|train|merge|summary|test) stage=$1; shift;; --|"") ;; *) echo "run.sh: unknown stage '$1'; one of setup data train merge summary test" >&2; exit 2;; esac
[ "${1:-}" = "--" ] && shift
case "$stage" in all|train|test) ;; *) [ $# = 0 ] || { echo "run.sh: the stage '$stage' takes no options" >&2; exit 2; };; esac

# ---------------------------------------------------------------------------------------------------------------------
# Settings; the environment overrides them
GPU=${GPU:-$(nvidia-smi -L > /dev/null 2>&1 && echo 1 || echo 0)}   # 1: NVIDIA GPUs, 0: CPU
ALGO=${ALGO:-grpo}                                                  # the algorithm
SEED=${SEED:-0}                                                     # of data order and sampling (and of the demo's model)
NAME=${NAME:-$ALGO-$SEED}                                           # of the run
OUT=${OUT:-checkpoints}                                             # checkpoints, metrics and the merged model go below it
VENV=${VENV:-$here/.venv}                                           # made if the active python lacks the packages
PROJECT=${PROJECT:-$([ -n "${DATA:-}" ] && basename "$DATA" || { [ "$GPU" = 1 ] && echo gsm8k || echo demo; })}
if [ "$GPU" = 1 ]; then
  NGPU=${NGPU:-$(nvidia-smi -L 2> /dev/null | wc -l)}               # GPUs, one process each
  MODEL=${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}                        # hub name or local directory
  DATA=${DATA:-data/gsm8k}                                          # {train,test}.parquet, or GSM8K's {train,test}.jsonl
  MINI=64; LENGTH=512
  options=(--engine vllm --train_batch_size 256 --ppo_mini_batch_size $MINI --n 8 --max_prompt_length 512 --max_response_length $LENGTH
           --lr 1e-6 --total_epochs 3 --test_freq 10 --save_freq 20)
else
  NGPU=${NGPU:-1}
  MODEL=${MODEL:-data/demo-$SEED/model}
  DATA=${DATA:-data/demo-$SEED}
  MINI=16; LENGTH=16
  options=(--engine hf --train_batch_size 64 --ppo_mini_batch_size $MINI --n 8 --max_prompt_length 32 --max_response_length $LENGTH
           --max_tokens_per_micro_batch 4096 --lr 3e-4 --lr_scheduler_type linear --warmup_steps 10 --clip_ratio_high 0.28 --total_training_steps 300 --test_freq 25 --save_freq 50)
fi
script=grpo.py
case "$ALGO" in  # what each paper sets; README.md has the table
  grpo) ;;
  ppo) script=ppo.py
    if [ "$GPU" = 1 ]; then options+=(--n 1 --max_response_length 256 --critic_lr 1e-5 --total_epochs 15 --save_freq 10)
    else options+=(--critic_lr 1e-4 --critic_ppo_epochs 4 --total_training_steps 240); fi;;  # a critic that keeps up with so fast an actor
  dr_grpo) options+=(--norm_adv_by_std_in_grpo false --loss_agg_mode seq-mean-token-sum-norm);;
  dapo) options+=(--clip_ratio_low 0.2 --clip_ratio_high 0.28 --loss_agg_mode token-mean --filter_groups true --overlong_buffer_len $((LENGTH / 5)));;
  gspo) options+=(--loss gspo --loss_agg_mode seq-mean-token-mean --clip_ratio_low 3e-4 --clip_ratio_high 4e-4);;
  rloo) options+=(--adv_estimator rloo --loss_agg_mode seq-mean-token-sum --use_kl_in_reward true);;
  reinforce_pp) options+=(--adv_estimator reinforce_plus_plus --use_kl_in_reward true);;
  reinforce_pp_baseline) options+=(--adv_estimator reinforce_plus_plus_baseline --use_kl_loss true --kl_loss_type k2);;
  remax) options+=(--adv_estimator remax --loss gpg --use_kl_in_reward true);;
  opo) options+=(--adv_estimator opo --train_batch_size $MINI); [ "$GPU" = 1 ] || options+=(--total_training_steps 1200);;  # strictly on-policy: one update a batch
  gpg) options+=(--adv_estimator gpg --loss gpg);;
  passk) options+=(--adv_estimator grpo_passk);;
  cispo) options+=(--loss cispo --clip_ratio_low 1 --clip_ratio_high 4);;
  gmpo) options+=(--loss geo_mean --loss_agg_mode seq-mean-token-mean --clip_ratio_low 0.4 --clip_ratio_high 0.4);;
  sapo) options+=(--loss sapo --loss_agg_mode seq-mean-token-mean --tau_pos 1.0 --tau_neg 1.05);;
  clip_cov) options+=(--loss clip_cov --clip_ratio_high 0.2 --clip_cov_ratio 2e-4 --clip_cov_lb 1 --clip_cov_ub 5);;
  kl_cov) options+=(--loss kl_cov --kl_cov_ratio 2e-4 --ppo_kl_coef 1);;
  *) echo "run.sh: unknown ALGO '$ALGO'; one of grpo ppo dr_grpo dapo gspo rloo reinforce_pp reinforce_pp_baseline remax opo gpg passk cispo gmpo sapo clip_cov kl_cov" >&2; exit 2;;
esac

# ---------------------------------------------------------------------------------------------------------------------
has() { python3 - "$@" <<< 'import importlib.util, sys; sys.exit(any(importlib.util.find_spec(m) is None for m in sys.argv[1:]))'; }

setup() {  # an active environment that has the packages is used as it is
  local need=(torch transformers datasets tqdm math_verify tensorboard); [ "$GPU" = 1 ] && need+=(vllm)
  [ "${1:-}" = test ] && need+=(pytest vllm)
  [ -f "$VENV/bin/activate" ] && . "$VENV/bin/activate"
  has "${need[@]}" && return
  [ -f "$VENV/bin/activate" ] || { echo "making a virtual environment in $VENV"; python3 -m venv "$VENV"; . "$VENV/bin/activate"; }
  echo "installing packages into $(python3 -c 'import sys; print(sys.prefix)') (some minutes)"
  if [ "$GPU" = 1 ]; then
    python3 -m pip install -q -r "$here/requirements.txt"
  else  # PyTorch's CPU wheels come from its own index; where it is out of reach, the package registry's serve
    python3 -m pip install -q --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0
    python3 -m pip install -q -r "$here/requirements-cpu.txt"
  fi
  if [ "${1:-}" = test ]; then
    python3 -m pip install -q -r "$here/tests/requirements.txt"
    has vllm || python3 -m pip install -q --no-deps -r "$here/tests/requirements-nodeps.txt"
  fi
}

data() {
  if [ -f "$DATA/train.jsonl" ] && [ ! -f "$DATA/train.parquet" ]; then  # raw GSM8K in a local folder
    python3 "$here/prepare_data.py" gsm8k --source "$DATA" --local_dir "data/$PROJECT"; DATA=data/$PROJECT
  elif [ ! -f "$DATA/train.parquet" ]; then
    [ "$GPU" = 1 ] && python3 "$here/prepare_data.py" gsm8k --local_dir "$DATA" || python3 "$here/prepare_data.py" demo --local_dir "$DATA" --seed "$SEED"
  fi
}

train() {
  local launch=(python3); [ "$NGPU" -gt 1 ] && launch=(torchrun --standalone --nproc_per_node "$NGPU" --)
  "${launch[@]}" "$here/$script" --train_files "$DATA/train.parquet" --val_files "$DATA/test.parquet" --model_path "$MODEL" --seed "$SEED" \
    --project_name "$PROJECT" --experiment_name "$NAME" --default_local_dir "$OUT" "${options[@]}" "$@"
}

run_dir=$OUT/$PROJECT/$NAME
merge() {
  [ -f "$run_dir/latest_checkpointed_iteration.txt" ] || { echo "run.sh: no checkpoint in $run_dir to merge; train first (with --save_freq above 0)" >&2; exit 1; }
  python3 "$here/merge.py" --local_dir "$run_dir/global_step_$(cat "$run_dir/latest_checkpointed_iteration.txt")/actor" --target_dir "$run_dir/merged"
}

summary() {
  python3 - "$run_dir" <<'PY'
import json, pathlib, sys
run = pathlib.Path(sys.argv[1])
rows = [json.loads(line) for line in open(run / "metrics.jsonl")]
print("\n" + "-" * 100)
for key in sorted({k for r in rows for k in r if k.startswith("val/") and k.endswith("/acc")}):
    values = [(r["step"], r[key]) for r in rows if key in r]
    print(f"accuracy on {key[4:-4]}: {values[0][1]:.1%} (step {values[0][0]}) -> {values[-1][1]:.1%} (step {values[-1][0]})")
scored = [r for r in rows if "critic/score/mean" in r]
print(f"mean training reward: {scored[0]['critic/score/mean']:.3f} -> {scored[-1]['critic/score/mean']:.3f}; median step {sorted(r['timing/step'] for r in scored)[len(scored) // 2]:.2f} s")
last = max(run.glob("rollouts/step_*.jsonl"), key=lambda p: int(p.stem.split("_")[1]), default=None)
for line in open(last).read().splitlines()[:9:8] if last else []:
    row = json.loads(line)
    print(f"\na sampled answer (reward {row['score']}, truth {row['ground_truth']}):\n  {row['prompt'].strip()}\n  -> {row['response'].strip()}")
print(f"\nmodel     {run / 'merged'}   (from_pretrained, vllm serve)\nmetrics   {run / 'metrics.jsonl'}\ncurves    tensorboard --logdir {run.parent}")
PY
}

case "$stage" in
  test)  setup test; cd "$here"; python3 -m pytest -q tests "$@";;
  all)   setup; data; train "$@"; merge; summary;;
  train) setup; data; train "$@";;
  *)     setup; [ "$stage" = setup ] || "$stage";;
esac
