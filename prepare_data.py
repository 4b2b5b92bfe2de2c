r"""Stage 1: questions and answers from anywhere -> {train,test}.parquet in verl's schema; and reading them back.

    python prepare_data.py gsm8k  --local_dir data/gsm8k
    python prepare_data.py math   --local_dir data/math
    python prepare_data.py custom --source mine.jsonl --prompt_field question --answer_field answer --data_source mine
    python prepare_data.py demo   --local_dir data/demo    # sums and a model of 0.6M parameters, offline, half a minute

A source is a .jsonl, .csv or .parquet file, a folder with train.* and test.* files of these types, or a data set's name on
the Hugging Face hub (on ModelScope if USE_MODELSCOPE=1 is set). A row as it is written:

    data_source   "openai/gsm8k"                               chooses the reward function
    prompt        [{"role": "user", "content": "..."}]         chat messages, the instruction included
    ability       "math"
    reward_model  {"style": "rule", "ground_truth": "72"}      what the response is compared with
    extra_info    {"split", "index", "answer", "question"}     the row as the source had it
"""

import argparse
import csv
import json
import os
import re
import shutil
import string
import warnings

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jinja2 import TemplateError

GSM8K, MATH = "openai/gsm8k", "DigitalLearningGmbH/MATH-lighteval"
MODELSCOPE_NAMES = {GSM8K: "AI-ModelScope/gsm8k", MATH: "AI-ModelScope/MATH-lighteval"}
FILE_TYPES = (".jsonl", ".csv", ".parquet")

# ---------------------------------------------------------------------------------------------------------------------
# Reading a source


def read_rows(path):
    """Rows of a .jsonl, .csv or .parquet file, as dicts of plain Python values."""
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path} does not exist: see `python prepare_data.py --help` for how to write it")
    rows = []
    try:
        if path.endswith(".jsonl"):
            with open(path, encoding="utf-8") as file:
                rows.extend(json.loads(line) for line in file if line.strip())
        elif path.endswith(".csv"):
            with open(path, encoding="utf-8", newline="") as file:
                rows.extend(csv.DictReader(file))  # values stay text: "007" is not 7
        else:
            with pq.ParquetFile(path) as file:
                rows = file.read().to_pylist()
    except (ValueError, OSError, pa.ArrowException) as error:
        kind = os.path.splitext(path)[1] if path.endswith(FILE_TYPES) else ".parquet"
        raise ValueError(f"{path} is not a readable {kind} file from row {len(rows)} on, write it again: {error}") from error
    return rows


def read_source(source, config=None):
    """{"train": rows, "test": rows} of a source, or the one of the two that it has; a single file is "train"."""
    if source.endswith(FILE_TYPES) or os.path.isfile(source):
        splits = {"train": read_rows(source)}
    elif os.path.isdir(source):
        paths = [(split, os.path.join(source, split + kind)) for split in ("train", "test") for kind in FILE_TYPES]
        splits = {split: read_rows(path) for split, path in paths if os.path.exists(path)}
    elif os.environ.get("USE_MODELSCOPE") == "1":
        try:
            from modelscope import MsDataset
        except ImportError as error:
            raise ImportError("USE_MODELSCOPE=1 needs the modelscope package: pip install modelscope") from error
        splits = MsDataset.load(MODELSCOPE_NAMES.get(source, source), subset_name=config)
    else:
        import datasets

        splits = datasets.load_dataset(source, config)
    if "train" not in splits and "test" not in splits:
        raise ValueError(f"{source} has neither a train nor a test split, only {sorted(splits)}")
    return {split: list(splits[split]) for split in ("train", "test") if split in splits}


# ---------------------------------------------------------------------------------------------------------------------
# Writing verl's schema


def hash_answer(text):
    """The number after "####" without its commas ("#### 1,080" -> "1080"), "" if there is none."""
    found = re.search(r"####\s*(-?[\d.,]*\d)", text)
    return found[1].replace(",", "") if found else ""


def last_boxed(text):
    r"""The content of the last \boxed{...}, whose braces may nest, "" if there is none."""
    *before, rest = re.split(r"\\boxed|\\fbox", text)
    if not before:
        return ""
    if not rest.startswith("{"):
        return rest.split("$")[0].strip()  # a few MATH solutions end in "\boxed 5$"
    depth = 0
    for brace in re.finditer(r"\\.|[{}]", rest):  # the first alternative steps over an escaped brace
        depth += (brace[0] == "{") - (brace[0] == "}")
        if depth == 0:
            return rest[1 : brace.start()]
    return ""


def has_text(messages):
    """True for a non-empty list of messages that all have a role and some text."""
    return isinstance(messages, list) and len(messages) > 0 and all(
        isinstance(m, dict) and m.get("role") and isinstance(m.get("content"), str) and m["content"].strip() for m in messages
    )


def convert(rows, split, args):
    """Rows of a source -> rows of verl's schema; an empty prompt or ground truth is an error that names the row."""
    source = args.test_source if split == "test" and args.test_source else args.source
    converted = []
    for index, row in enumerate(rows):
        where = f"{source} {split} row {index}"
        for field in (args.prompt_field, args.answer_field):
            if field not in row:
                raise ValueError(f"{where} has no field '{field}', only {sorted(row)}: set --prompt_field and --answer_field")
        messages, answer = row[args.prompt_field], row[args.answer_field]
        if not isinstance(messages, list):
            messages = [{"role": "user", "content": messages}]
        if not has_text(messages):
            raise ValueError(f"{where} has no text in '{args.prompt_field}': fill or remove the row")
        if not isinstance(answer, str):  # a column has one type: numbers and lists are written as JSON
            answer = "" if answer is None else json.dumps(answer, default=str)
        ground_truth = args.extract(answer)
        if not ground_truth:
            raise ValueError(f"{where} has no ground truth in '{args.answer_field}' ({answer[-80:]!r}): fill or remove the row")
        question = messages[-1]["content"]
        if args.instruction:
            messages = messages[:-1] + [{**messages[-1], "content": f"{question} {args.instruction}"}]
        if args.system:
            messages = [{"role": "system", "content": args.system}] + messages
        converted.append({
            "data_source": args.data_source,
            "prompt": messages,
            "ability": args.ability,
            "reward_model": {"style": "rule", "ground_truth": ground_truth},
            "extra_info": {"split": split, "index": index, "answer": answer, "question": question},
        })
    return converted


def hold_out(rows, test_size):
    """Splits off a share (below 1) or a number of rows for testing, always the same ones."""
    num_test = round(test_size * len(rows)) if test_size < 1 else int(test_size)
    if not 0 < num_test < len(rows):
        raise ValueError(f"--test_size {test_size:g} takes {num_test} of {len(rows)} rows: leave some on either side")
    order = epoch_order(len(rows), seed=0, epoch=0)
    test = [{**rows[i], "extra_info": {**rows[i]["extra_info"], "split": "test"}} for i in sorted(order[:num_test])]
    return {"train": [rows[i] for i in sorted(order[num_test:])], "test": test}


def write_splits(splits, local_dir):
    os.makedirs(local_dir, exist_ok=True)
    for split, rows in splits.items():
        path = os.path.join(local_dir, f"{split}.parquet")
        if not rows:
            raise ValueError(f"no rows for {path}: the source is empty")
        pq.write_table(pa.Table.from_pylist(rows), path + ".tmp")
        os.replace(path + ".tmp", path)  # nobody ever reads half a file
        print(f"{path}: {len(rows)} rows")


def prepare(args):
    """The commands gsm8k, math and custom."""
    splits = read_source(args.source, args.config)
    if args.test_source:
        test = read_source(args.test_source, args.config)
        splits["test"] = test["test"] if "test" in test else test["train"]
    splits = {split: convert(rows, split, args) for split, rows in splits.items()}
    if "test" not in splits:
        splits = hold_out(splits["train"], args.test_size)
    write_splits(splits, args.local_dir)


# ---------------------------------------------------------------------------------------------------------------------
# Reading the files back


def resolve_model(path, option="model_path"):
    """Local directory of a model (hub names are passed on; USE_MODELSCOPE=1 downloads from ModelScope); checked before anything starts."""
    if os.environ.get("USE_MODELSCOPE") == "1" and not os.path.isdir(path):
        from modelscope import snapshot_download
        path = snapshot_download(path)
    from transformers import AutoConfig, AutoTokenizer
    try:
        return path, AutoConfig.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"--{option} {path}: no model there that transformers can load; give a local directory or a hub name "
                         f"({str(error).strip().splitlines()[0]})") from None


def load_prompts(files, tokenizer, max_prompt_length, *, prompt_key="prompt", truncation="filter", min_rows=1, need_truth=True):
    """Parquet files -> one dict a prompt: prompt_ids, prompt (messages), data_source, ground_truth, extra_info, index.

    A prompt longer than max_prompt_length tokens is dropped ("filter"), an error ("error"), or cut as verl cuts it: "left"
    keeps the tail, "right" the head, "middle" both ends. min_rows is the training batch size: an epoch of fewer prompts has
    no step. need_truth: false where a reward model alone scores. Whatever training could not use is a ValueError that names
    the file and the rows, counted from 0.
    """
    files = [files] if isinstance(files, (str, os.PathLike)) else list(files)
    if truncation not in ("filter", "error", "left", "right", "middle"):
        raise ValueError(f"truncation is {truncation!r}: use filter, error, left, right or middle")
    if not tokenizer.chat_template:
        raise ValueError(f"{tokenizer.name_or_path} has no chat template: use the model's instruct version, "
                         "or put a chat_template.jinja into its directory")
    rows = [(path, number, row) for path in map(str, files) for number, row in enumerate(read_checked(path, prompt_key, need_truth))]
    # Parquet gives every message the keys of all messages; the template must not see those that are not its own.
    conversations = [[{k: v for k, v in m.items() if v is not None} for m in row[prompt_key]] for _, _, row in rows]
    prompts, num_long = [], 0
    for (path, number, row), messages, ids in zip(rows, conversations, tokenize(conversations, tokenizer)):
        if len(ids) > max_prompt_length:
            num_long += 1
            if truncation == "filter":
                continue
            if truncation == "error":
                raise ValueError(f"{path} row {number} has {len(ids)} tokens > --max_prompt_length {max_prompt_length}: "
                                 "raise that or choose another truncation")
            head = {"left": 0, "right": max_prompt_length, "middle": max_prompt_length // 2}[truncation]
            ids = ids[:head] + ids[len(ids) - (max_prompt_length - head) :]
        prompts.append({
            "prompt_ids": ids,
            "prompt": messages,
            "data_source": row["data_source"],
            "ground_truth": (row.get("reward_model") or {}).get("ground_truth"),
            "extra_info": row.get("extra_info") or {},
            "index": len(prompts),
        })
    summary = (f"{len(rows)} prompts from {', '.join(os.path.basename(path) for path in files)}, {num_long} longer than "
               f"{max_prompt_length} tokens " + ("filtered" if truncation == "filter" else f"cut ({truncation})"))
    if len(prompts) < min_rows:
        raise ValueError(f"{len(prompts)} rows < train_batch_size {min_rows} ({summary}): "
                         "lower the batch size, raise --max_prompt_length or add rows")
    if min_rows > 1:
        summary += f", {len(prompts) // min_rows} steps an epoch, {len(prompts) % min_rows} rows left out of each"
    if os.environ.get("RANK", "0") == "0":
        print(f"data: {summary}")
    return prompts


def read_checked(path, prompt_key, need_truth=True):
    """Rows of a parquet file, or a ValueError, before any model is loaded, that tells why some can't be trained on."""
    rows = read_rows(path)
    if not rows:
        raise ValueError(f"{path} has no rows: write it again with prepare_data.py")
    missing = [column for column in (prompt_key, "data_source", *(["reward_model"] if need_truth else [])) if column not in rows[0]]
    if missing:
        raise ValueError(f"{path} lacks the columns {missing}, it has {list(rows[0])}: convert it with "
                         f"`python prepare_data.py custom --source {path} --prompt_field ... --answer_field ...`")
    rules = [row.get("reward_model") for row in rows]
    truths = [rule.get("ground_truth") if isinstance(rule, dict) else None for rule in rules]
    faults = {
        f"a prompt without text in '{prompt_key}'": [not has_text(row.get(prompt_key)) for row in rows],
        # An empty truth would equal an answer that could not be read, and reward it.
        "no ground truth in 'reward_model'": [need_truth and truth in (None, "", []) for truth in truths],
        "no name in 'data_source'": [not row.get("data_source") for row in rows],
    }
    for fault, bad in faults.items():
        if any(bad):
            raise ValueError(f"{path}: {sum(bad)} rows have {fault}, first rows {np.flatnonzero(bad)[:5].tolist()}: "
                             "fill or remove them at the source and write the file again")
    return rows


def tokenize(conversations, tokenizer, add_generation_prompt=True):
    """Token ids of each conversation up to the assistant's turn; a system text that the template refuses moves to the user's.

    The template itself writes BOS: rendering it to text and encoding that with special tokens would double it.
    """
    try:
        return tokenizer.apply_chat_template(conversations, add_generation_prompt=add_generation_prompt, return_dict=True)["input_ids"]
    except TemplateError:
        with_system = [messages for messages in conversations if messages[0]["role"] == "system" and len(messages) > 1]
        if not with_system:
            raise
    warnings.warn(f"the chat template of {tokenizer.name_or_path} has no system role: its text goes before the user's")
    for messages in with_system:
        system = messages.pop(0)
        messages[0]["content"] = f"{system['content']}\n\n{messages[0]['content']}"
    return tokenize(conversations, tokenizer, add_generation_prompt)


def epoch_order(num_rows, seed, epoch):
    """A permutation of range(num_rows) that depends on (seed, epoch) alone."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch]))).permutation(num_rows)


def batch_rows(num_rows, batch_size, seed, step):
    """Row indices of training step `step` (from 0): resuming needs no state. The rest of an epoch's order is left out."""
    steps_per_epoch = num_rows // batch_size
    if steps_per_epoch == 0:
        raise ValueError(f"{num_rows} rows < train_batch_size {batch_size}: lower the batch size or add rows")
    epoch, i = divmod(step, steps_per_epoch)
    return epoch_order(num_rows, seed, epoch)[i * batch_size : (i + 1) * batch_size]


# ---------------------------------------------------------------------------------------------------------------------
# The demo: sums, and a small model that gets four of ten right and leaves the rest to reinforcement learning


def demo_tokenizer():
    """One token a character, and one for each of the two phrases that every problem shares; EOS ends every turn."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<bos>", "<eos>", "<unk>", "<|system|>", "<|user|>", "<|assistant|>"]
    vocab = {token: i for i, token in enumerate(special + list(string.printable))}
    characters = Tokenizer(models.BPE(vocab, merges=[], unk_token="<unk>"))  # no merges: characters stay apart
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>",
                                        unk_token="<unk>", additional_special_tokens=special[4:])
    tokenizer.add_tokens(["what is ", "#### "])
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    return tokenizer


def demo_batch(prompts, tokenizer):
    """ids and labels of prompt + answer + EOS  # (N, L); padded on the right, where causal attention needs no mask."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    ids, labels = [], []
    for prompt in prompts:
        answer = tokenizer.encode(prompt["extra_info"]["answer"], add_special_tokens=False) + [tokenizer.eos_token_id]
        ids.append(torch.tensor(prompt["prompt_ids"] + answer))
        labels.append(torch.tensor([-100] * len(prompt["prompt_ids"]) + answer))
    return (pad_sequence(ids, batch_first=True, padding_value=tokenizer.pad_token_id),
            pad_sequence(labels, batch_first=True, padding_value=-100))


def demo_accuracy(model, ids, labels):
    """Exact accuracy of greedy decoding and, on average, of sampling at temperature 1, from one teacher-forced pass."""
    import torch

    with torch.no_grad():
        logp = model(input_ids=ids).logits[:, :-1].log_softmax(-1)  # (N, L-1, V)
    labels = labels[:, 1:]  # (N, L-1)
    response_mask = labels != -100  # (N, L-1)
    label_logp = logp.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)  # (N, L-1)
    greedy = ((logp.argmax(-1) == labels) | ~response_mask).all(1)  # (N,)
    return greedy.float().mean().item(), (label_logp * response_mask).sum(1).exp().mean().item()


def demo(args):
    import torch
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
    from tqdm import trange
    from transformers import LlamaConfig, LlamaForCausalLM

    sums = [{"question": f"what is {a}+{b}?", "answer": f"#### {a + b}"} for a in range(21) for b in range(21)]
    order = epoch_order(len(sums), args.seed, epoch=0)
    chosen = {"train": sorted(order[len(sums) // 5 :]), "test": sorted(order[: len(sums) // 5])}
    write_splits({split: convert([sums[i] for i in rows], split, args) for split, rows in chosen.items()}, args.local_dir)

    tokenizer = demo_tokenizer()
    prompts = {split: load_prompts(f"{args.local_dir}/{split}.parquet", tokenizer, 64) for split in chosen}
    batches = {split: demo_batch(prompts[split], tokenizer) for split in chosen}
    ids, labels = batches["train"]
    torch.set_num_threads(1)  # on cores that others use too, the threads of operations this small wait for each other
    torch.manual_seed(args.seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=344, num_hidden_layers=3, num_attention_heads=4,
        max_position_embeddings=1024, tie_word_embeddings=True, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    ))
    # The average of the last weights is what is judged and kept: the accuracy of the weights themselves jumps by 0.2 a step.
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.97))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    progress = trange(1, 1001, desc="warm start", mininterval=1)
    for step in progress:
        batch = torch.randint(len(ids), (64,))
        model(input_ids=ids[batch], labels=labels[batch]).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        if step % 4 == 0:
            greedy, _ = demo_accuracy(average.module, *batches["test"])
            progress.set_postfix(accuracy=f"{greedy:.2f}")
            if greedy >= 0.43:
                break
    progress.close()
    for split in chosen:
        greedy, sampled = demo_accuracy(average.module, *batches[split])
        print(f"{split} accuracy after {step} steps: {greedy:.3f} greedy, {sampled:.3f} sampled at temperature 1")

    path = os.path.join(args.local_dir, "model")
    shutil.rmtree(path + ".tmp", ignore_errors=True)
    average.module.save_pretrained(path + ".tmp")
    tokenizer.save_pretrained(path + ".tmp")
    shutil.rmtree(path, ignore_errors=True)
    os.replace(path + ".tmp", path)
    print(f"{path}: {model.num_parameters()} parameters")


# ---------------------------------------------------------------------------------------------------------------------


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="gsm8k | math | custom | demo")

    def command(name, run, **settings):
        sub = commands.add_parser(name)
        sub.add_argument("--local_dir", default=f"data/{name}", help="folder to write to (%(default)s)")
        sub.set_defaults(run=run, **{"config": None, "test_source": None, "test_size": 0.05, "ability": "math",
                                     "instruction": "", "system": "", **settings})
        return sub

    sub = command("gsm8k", prepare, data_source=GSM8K, config="main", prompt_field="question", answer_field="answer",
                  extract=hash_answer, instruction='Let\'s think step by step and output the final answer after "####".')
    sub.add_argument("--source", default=GSM8K, help="hub name, or a folder with train.jsonl and test.jsonl (%(default)s)")

    sub = command("math", prepare, data_source=MATH, prompt_field="problem", answer_field="solution", extract=last_boxed,
                  instruction=r"Let's think step by step and output the final answer within \boxed{}.")
    sub.add_argument("--source", default=MATH, help="hub name, or a folder with train.jsonl and test.jsonl (%(default)s)")

    sub = command("custom", prepare, extract=str.strip, ability="custom")
    sub.add_argument("--source", required=True, help=".jsonl, .csv or .parquet file, folder, or hub name")
    sub.add_argument("--config", help="configuration of the hub's data set, if it has several")
    sub.add_argument("--prompt_field", default="question", help="a text or a list of messages (%(default)s)")
    sub.add_argument("--answer_field", default="answer", help="the ground truth (%(default)s)")
    sub.add_argument("--data_source", required=True, help="the name by which the reward function is chosen")
    sub.add_argument("--test_source", help="where the test rows are, if --source has none")
    sub.add_argument("--test_size", type=float, default=0.05, help="share or number of rows to hold out, if there are none")
    sub.add_argument("--instruction", default="", help="text to put after every question")
    sub.add_argument("--system", default="", help="system message of every prompt")

    sub = command("demo", demo, source="demo", data_source="demo/arithmetic", prompt_field="question", answer_field="answer",
                  extract=hash_answer)
    sub.add_argument("--seed", type=int, default=0, help="of the split, the weights and the warm start (%(default)s)")

    args = parser.parse_args(argv)
    args.run(args)


if __name__ == "__main__":
    main()
