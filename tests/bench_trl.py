"""The peer: TRL's GRPOTrainer on the work of bench.py's `grpo`; a JSON line a step, with grpo.py's names, to --results.

Equal to ours: model, prompts and their order (prepare_data.batch_rows), reward (reward.compute_score), responses a prompt and their length,
temperature, clipping, token-mean loss, one optimizer step a batch, no KL, AdamW, fp32 masters and bf16 compute, no gradient checkpointing. Left out for
the same reason, and in TRL's favour: the correction for vLLM's probabilities, which costs a forward (--set vllm_importance_sampling_correction=true).
TRL's own: padded rows, --peer_rows sequences a forward, vLLM in the same process that sleeps while the model trains.
"""

import argparse
import json
import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process: TRL writes into its weights
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from bench_parts import Stopwatch
from prepare_data import batch_rows, load_prompts
from reward import compute_score

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
for name, kind, default in (("model", str, None), ("train_file", str, None), ("results", str, None), ("steps", int, 7), ("engine", str, "vllm"), ("prompts", int, 64),
                            ("n", int, 8), ("max_prompt_length", int, 512), ("max_response_length", int, 256), ("peer_rows", int, 64)):
    parser.add_argument(f"--{name}", type=kind, default=default, required=default is None)
parser.add_argument("--set", action="append", default=[], help="field=JSON of GRPOConfig, for trying another setting")


class Clock(Stopwatch, TrainerCallback):
    """Writes seconds and tokens of each step, and where the seconds went."""

    def __init__(self, results):
        super().__init__()
        self.results = results

    def on_step_begin(self, args, state, control, **kwargs):
        self.spent.clear()
        self.started, self.tokens = self.now(), state.num_input_tokens_seen

    def on_step_end(self, args, state, control, **kwargs):
        seconds = self.now() - self.started
        row = {"step": state.global_step, "timing/step": seconds, **{f"timing/{phase}": s for phase, s in self.spent.items()},
               "timing/update_actor": seconds - sum(self.spent.values()), "perf/total_num_tokens": state.num_input_tokens_seen - self.tokens,
               "perf/max_memory_allocated_gb": torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0}
        with open(self.results, "a") as file:
            file.write(json.dumps(row) + "\n")


def reward(prompts, completions, data_source, ground_truth, **kwargs):
    return [compute_score(*item) for item in zip(data_source, (completion[0]["content"] for completion in completions), ground_truth)]


def main():
    opt, on_gpu = parser.parse_args(), torch.cuda.is_available()
    tokenizer = AutoTokenizer.from_pretrained(opt.model)
    train = load_prompts(opt.train_file, tokenizer, opt.max_prompt_length)
    rows = [train[i] for step in range(opt.steps) for i in batch_rows(len(train), opt.prompts, 0, step)]
    data = Dataset.from_list([{key: row[key] for key in ("prompt", "data_source", "ground_truth")} for row in rows])
    clock = Clock(opt.results)
    settings = dict(
        output_dir=os.path.dirname(opt.results), max_steps=opt.steps, shuffle_dataset=False, report_to="none", logging_strategy="no", save_strategy="no", disable_tqdm=True,
        per_device_train_batch_size=min(opt.peer_rows, opt.prompts * opt.n), gradient_accumulation_steps=max(1, opt.prompts * opt.n // opt.peer_rows), num_generations=opt.n,
        max_completion_length=opt.max_response_length, temperature=1.0, top_p=1.0, beta=0.0, epsilon=0.2, loss_type="dapo", learning_rate=1e-6, weight_decay=0.01,
        lr_scheduler_type="constant", max_grad_norm=1.0, bf16=on_gpu, gradient_checkpointing=False, model_init_kwargs={"dtype": "float32"},
        use_cpu=not on_gpu, use_vllm=on_gpu and opt.engine == "vllm", vllm_mode="colocate", vllm_enable_sleep_mode=on_gpu, vllm_gpu_memory_utilization=0.3,
        vllm_max_model_length=opt.max_prompt_length + opt.max_response_length, vllm_importance_sampling_correction=False)
    settings |= {key: json.loads(value) for key, value in (pair.split("=", 1) for pair in opt.set)}
    trainer = GRPOTrainer(model=opt.model, reward_funcs=reward, args=GRPOConfig(**settings), train_dataset=data, processing_class=tokenizer, callbacks=[clock])
    clock.watch(trainer, "_generate_single_turn", "gen")
    clock.watch(trainer, "_calculate_rewards", "reward")
    if settings["use_vllm"]:
        clock.watch(trainer.vllm_generation, "sync_weights", "sync")
        for method in ("sleep", "wake_up"):
            clock.watch(trainer.vllm_generation.llm, method, "sleep")
    print(f"{type(trainer.model).__name__} of {sum(p.numel() for p in trainer.model.parameters()) / 1e6:.1f}M parameters, sleep {'always' if settings['vllm_enable_sleep_mode'] else 'never'}; {settings}", flush=True)
    trainer.train()


if __name__ == "__main__":
    main()
