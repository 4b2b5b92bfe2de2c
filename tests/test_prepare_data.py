"""Stage 1: what is written, what is read back, and what is refused before a model is loaded."""

import json
import os
import string
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import prepare_data

BOS, USER, ASSISTANT, EOS = 1, 5, 6, 2


@pytest.fixture(scope="session")
def tokenizer():
    return prepare_data.demo_tokenizer()


def row(content="2+2?", truth="4", **changes):
    return {
        "data_source": "invented",
        "prompt": [{"role": "user", "content": content}],
        "reward_model": {"style": "rule", "ground_truth": truth},
        **changes,
    }


def parquet(tmp_path, rows, name="train.parquet"):
    path = str(tmp_path / name)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def jsonl(tmp_path, rows, name="train.jsonl"):
    (tmp_path / name).write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(tmp_path / name)


def ids_of(text, tokenizer):
    return tokenizer.encode(text, add_special_tokens=False)


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def test_gsm8k_has_verls_columns_and_types(tmp_path, tokenizer, capsys):
    jsonl(tmp_path, [{"question": "How many eggs?", "answer": "A dozen is 12.\n#### 12"}] * 3, "train.jsonl")
    jsonl(tmp_path, [{"question": "How many legs?", "answer": "#### 1,080"}], "test.jsonl")
    prepare_data.main(["gsm8k", "--source", str(tmp_path), "--local_dir", str(tmp_path / "new" / "gsm8k")])
    written = pq.read_table(tmp_path / "new" / "gsm8k" / "train.parquet")
    text, message = pa.string(), pa.struct([("role", pa.string()), ("content", pa.string())])
    assert written.schema.remove_metadata() == pa.schema([
        ("data_source", text),
        ("prompt", pa.list_(message)),
        ("ability", text),
        ("reward_model", pa.struct([("style", text), ("ground_truth", text)])),
        ("extra_info", pa.struct([("split", text), ("index", pa.int64()), ("answer", text), ("question", text)])),
    ])
    assert written.to_pylist()[1] == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "How many eggs? Let's think step by step and output the final answer after "
                                               '"####".'}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "12"},
        "extra_info": {"split": "train", "index": 1, "answer": "A dozen is 12.\n#### 12", "question": "How many eggs?"},
    }
    assert sorted(os.listdir(tmp_path / "new" / "gsm8k")) == ["test.parquet", "train.parquet"]  # no temporary file stays
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("train.parquet: 3 rows") and lines[1].endswith("test.parquet: 1 rows") and len(lines) == 2
    [prompt] = prepare_data.load_prompts(str(tmp_path / "new" / "gsm8k" / "test.parquet"), tokenizer, 512)
    assert prompt["ground_truth"] == "1080"


@pytest.mark.parametrize("answer, truth", [  # fault 16
    ("He saves.\n#### 1,080", "1080"), ("####-4", "-4"), ("#### 3.5", "3.5"), ("#### 17.", "17"),
    ("no marker", ""), ("####", ""), ("#### ,", ""), ("#### 1\n#### 2", "1"),
])
def test_hash_answer(answer, truth):
    assert prepare_data.hash_answer(answer) == truth


def test_answer_without_marker_names_split_and_row(tmp_path):  # fault 16
    rows = [{"question": "a?", "answer": "#### 1"}, {"question": "b?", "answer": "it is 2"}]
    jsonl(tmp_path, rows[:1], "train.jsonl")
    jsonl(tmp_path, rows, "test.jsonl")
    with pytest.raises(ValueError, match="test row 1 has no ground truth in 'answer' .'it is 2'."):
        prepare_data.main(["gsm8k", "--source", str(tmp_path), "--local_dir", str(tmp_path / "out")])
    assert not os.path.exists(tmp_path / "out")


@pytest.mark.parametrize("solution, truth", [
    (r"so \boxed{5}", "5"), (r"\boxed{1} then \boxed{\frac{1}{\sqrt{2}}}.", r"\frac{1}{\sqrt{2}}"),
    (r"\boxed{\left\{1,2\right.}", r"\left\{1,2\right."), (r"is $\boxed 7$.", "7"), (r"\fbox{C}", "C"),
    ("no box {3}", ""), (r"\boxed{unclosed", ""), (r"\boxed{}", ""), ("", ""),
])
def test_last_boxed(solution, truth):
    assert prepare_data.last_boxed(solution) == truth


def test_math(tmp_path):
    for split in ("train", "test"):
        jsonl(tmp_path, [{"problem": "1+1?", "solution": r"It is \boxed{2}.", "level": "1"}], f"{split}.jsonl")
    prepare_data.main(["math", "--source", str(tmp_path), "--local_dir", str(tmp_path)])
    [written] = pq.read_table(tmp_path / "test.parquet").to_pylist()
    assert written["data_source"] == "DigitalLearningGmbH/MATH-lighteval" and written["reward_model"]["ground_truth"] == "2"
    assert written["prompt"][0]["content"] == r"1+1? Let's think step by step and output the final answer within \boxed{}."


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_custom_reads_every_file_type(tmp_path, kind):
    rows = [{"ask": f"what, is {i}?", "tell": str(i)} for i in range(40)]
    source = str(tmp_path / f"mine.{kind}")
    if kind == "jsonl":
        jsonl(tmp_path, rows, "mine.jsonl")
    elif kind == "csv":
        (tmp_path / "mine.csv").write_text("ask,tell\n" + "".join(f'"{r["ask"]}",{r["tell"]}\n' for r in rows))
    else:
        parquet(tmp_path, rows, "mine.parquet")
    prepare_data.main(["custom", "--source", source, "--prompt_field", "ask", "--answer_field", "tell", "--data_source", "mine",
                       "--system", "Be brief.", "--instruction", "Say it.", "--local_dir", str(tmp_path)])
    train, test = (pq.read_table(tmp_path / f"{split}.parquet").to_pylist() for split in ("train", "test"))
    assert (len(train), len(test)) == (38, 2)  # 5 % of 40
    assert sorted(r["extra_info"]["index"] for r in train + test) == list(range(40))
    index = test[0]["extra_info"]["index"]
    assert test[0]["prompt"] == [{"role": "system", "content": "Be brief."},
                                 {"role": "user", "content": f"what, is {index}? Say it."}]
    assert test[0]["reward_model"]["ground_truth"] == str(index) and test[0]["extra_info"]["split"] == "test"


def test_custom_messages_numbers_and_test_source(tmp_path):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "2*3?"}]
    jsonl(tmp_path, [{"question": chat, "answer": 6}, {"question": chat, "answer": ["6", "six"]}], "a.jsonl")
    jsonl(tmp_path, [{"question": "b?", "answer": "7"}], "b.jsonl")
    prepare_data.main(["custom", "--source", str(tmp_path / "a.jsonl"), "--test_source", str(tmp_path / "b.jsonl"),
                       "--data_source", "mine", "--local_dir", str(tmp_path)])
    train, test = (pq.read_table(tmp_path / f"{split}.parquet").to_pylist() for split in ("train", "test"))
    assert train[0]["prompt"] == chat and train[0]["extra_info"]["question"] == "2*3?"
    assert [r["reward_model"]["ground_truth"] for r in train + test] == ["6", '["6", "six"]', "7"]


@pytest.mark.parametrize("bad, message", [
    ({"question": "a?"}, "row 1 has no field 'answer', only ..question"),
    ({"question": "", "answer": "1"}, "row 1 has no text in 'question'"),
    ({"question": None, "answer": "1"}, "row 1 has no text in 'question'"),
    ({"question": [], "answer": "1"}, "row 1 has no text in 'question'"),
    ({"question": "a?", "answer": None}, "row 1 has no ground truth in 'answer'"),
    ({"question": "a?", "answer": " "}, "row 1 has no ground truth in 'answer'"),
])
def test_custom_names_the_bad_row(tmp_path, bad, message):
    source = jsonl(tmp_path, [{"question": "a?", "answer": "1"}, bad, {"question": "a?", "answer": "1"}])
    with pytest.raises(ValueError, match=message):
        prepare_data.main(["custom", "--source", source, "--data_source", "mine", "--local_dir", str(tmp_path)])
    (tmp_path / "train.jsonl").write_text('{"question": "a?", "answer": "1"}\n{"question": \n')
    with pytest.raises(ValueError, match="train.jsonl is not a readable .jsonl file from row 1 on"):
        prepare_data.read_rows(source)


def test_test_size_must_leave_rows_on_both_sides(tmp_path):
    source = jsonl(tmp_path, [{"question": "a?", "answer": "1"}] * 4)
    command = ["custom", "--source", source, "--data_source", "mine", "--local_dir", str(tmp_path), "--test_size"]
    for size in ("0.05", "4"):
        with pytest.raises(ValueError, match=f"--test_size {size} takes . of 4 rows"):
            prepare_data.main(command + [size])
    prepare_data.main(command + ["3"])
    assert pq.read_table(tmp_path / "test.parquet").num_rows == 3


def test_modelscope_without_the_package_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("USE_MODELSCOPE", "1")
    monkeypatch.setitem(sys.modules, "modelscope", None)  # None makes the import fail
    with pytest.raises(ImportError, match="pip install modelscope"):
        prepare_data.read_source("openai/gsm8k", "main")


def test_import_is_light():
    code = "import prepare_data, sys; assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=os.path.dirname(prepare_data.__file__))


# ---------------------------------------------------------------------------------------------------------------------
# Reading back


def test_prompt_ids_by_hand_and_bos_once(tmp_path, tokenizer, capsys):
    # A tokenizer that, like Llama's, puts BOS before any text it encodes, and whose template writes BOS too.
    from tokenizers.processors import TemplateProcessing

    doubling = prepare_data.demo_tokenizer()
    doubling.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    assert doubling.encode("2")[0] == BOS
    path = parquet(tmp_path, [row("2+2?"), row("hello", truth="5")])
    digit_2, plus, question = (7 + string.printable.index(c) for c in "2+?")  # 7 special tokens stand before
    for some_tokenizer in (tokenizer, doubling):
        prompts = prepare_data.load_prompts(path, some_tokenizer, 512)
        assert prompts[0]["prompt_ids"] == [BOS, USER, digit_2, plus, digit_2, question, EOS, ASSISTANT]
    assert prompts[1] == {
        "prompt_ids": [BOS, USER, *ids_of("hello", tokenizer), EOS, ASSISTANT], "prompt": row("hello")["prompt"],
        "data_source": "invented", "ground_truth": "5", "extra_info": {}, "index": 1,
    }
    assert capsys.readouterr().out.splitlines()[0] == "data: 2 prompts from train.parquet, 0 longer than 512 tokens filtered"


def test_reads_files_made_by_verl(tmp_path, tokenizer):
    """verl writes by datasets or by pandas, with columns of its own, and leaves out what a source doesn't have."""
    import datasets
    import pandas

    rows = [row(f"{i}+1?", truth=str(i + 1), ability="math", extra_info={"split": "train", "index": i}) for i in range(3)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "datasets.parquet")
    arrays = [{**r, "prompt": np.array(r["prompt"], dtype=object), "agent_name": "x"} for r in rows]
    pandas.DataFrame(arrays).to_parquet(tmp_path / "pandas.parquet")
    del rows[1]["extra_info"], rows[2]["ability"]
    parquet(tmp_path, [{k: v for k, v in r.items() if k not in ("ability", "extra_info")} for r in rows], "bare.parquet")
    files = [tmp_path / f"{name}.parquet" for name in ("datasets", "pandas", "bare")]
    prompts = prepare_data.load_prompts(files, tokenizer, 512)
    assert [p["index"] for p in prompts] == list(range(9))
    assert [p["prompt"][0]["content"] for p in prompts] == ["0+1?", "1+1?", "2+1?"] * 3
    assert [p["ground_truth"] for p in prompts] == ["1", "2", "3"] * 3
    assert [p["extra_info"].get("index") for p in prompts] == [0, 1, 2, 0, 1, 2, None, None, None]


def test_prompt_key_and_keys_of_other_messages(tmp_path, tokenizer):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "name": "bot"},
            {"role": "user", "content": "c"}]
    path = parquet(tmp_path, [{**row(), "chat": chat}])
    [prompt] = prepare_data.load_prompts(path, tokenizer, 512, prompt_key="chat")
    assert prompt["prompt"] == chat  # no "name": None in the user's messages
    a, b, c = ids_of("abc", tokenizer)
    assert prompt["prompt_ids"] == [BOS, USER, a, EOS, ASSISTANT, b, EOS, USER, c, EOS, ASSISTANT]


def test_truncation(tmp_path, tokenizer, capsys):
    path = parquet(tmp_path, [row("7"), row("12345")])  # 5 and 9 tokens
    whole = [BOS, USER, *ids_of("12345", tokenizer), EOS, ASSISTANT]
    load = lambda limit, mode: [p["prompt_ids"] for p in prepare_data.load_prompts(path, tokenizer, limit, truncation=mode)]
    assert len(load(9, "error")) == 2
    assert load(5, "filter") == [[BOS, USER, *ids_of("7", tokenizer), EOS, ASSISTANT]]
    assert load(5, "left")[1] == [*ids_of("345", tokenizer), EOS, ASSISTANT]
    assert load(5, "right")[1] == [BOS, USER, *ids_of("123", tokenizer)]
    assert load(5, "middle")[1] == [BOS, USER, *ids_of("5", tokenizer), EOS, ASSISTANT]  # 5 // 2 = 2 from the head
    assert load(8, "middle")[1] == whole[:4] + whole[5:] and load(1, "left")[1] == [ASSISTANT]
    assert "2 prompts from train.parquet, 1 longer than 5 tokens cut (left)" in capsys.readouterr().out
    with pytest.raises(ValueError, match="train.parquet row 1 has 9 tokens > --max_prompt_length 5"):
        load(5, "error")
    with pytest.raises(ValueError, match="truncation is 'centre'"):
        load(5, "centre")


def test_missing_columns(tmp_path, tokenizer):  # fault 15
    path = parquet(tmp_path, [{"question": "a?", "answer": "1"}])
    with pytest.raises(ValueError) as error:
        prepare_data.load_prompts(path, tokenizer, 512)
    for part in (path, "['prompt', 'data_source', 'reward_model']", "['question', 'answer']", "prepare_data.py custom"):
        assert part in str(error.value)
    with pytest.raises(ValueError, match="lacks the columns .'chat'."):
        prepare_data.load_prompts(parquet(tmp_path, [row()]), tokenizer, 512, prompt_key="chat")


@pytest.mark.parametrize("bad", [None, [], [{"role": "user", "content": None}], [{"role": "user", "content": " "}],
                                 [{"role": None, "content": "a"}]])
def test_prompt_without_text(tmp_path, tokenizer, bad):  # fault 18
    rows = [row(), *[row(prompt=bad)] * 6, row()]
    fault = r"train.parquet: 6 rows have a prompt without text in 'prompt', first rows .1, 2, 3, 4, 5.:"
    with pytest.raises(ValueError, match=fault):
        prepare_data.load_prompts(parquet(tmp_path, rows), tokenizer, 512)


@pytest.mark.parametrize("bad", [{"reward_model": None}, {"reward_model": {"style": "rule", "ground_truth": None}},
                                 {"reward_model": {"style": "rule", "ground_truth": ""}}])
def test_no_ground_truth(tmp_path, tokenizer, bad):  # fault 16: an empty truth would equal an empty answer
    with pytest.raises(ValueError, match="1 rows have no ground truth in 'reward_model', first rows .1.:"):
        prepare_data.load_prompts(parquet(tmp_path, [row(), row(**bad)]), tokenizer, 512)


def test_where_a_reward_model_scores_no_truth_is_needed(tmp_path, tokenizer):
    for rows in ([{k: v for k, v in row().items() if k != "reward_model"}], [row(reward_model=None), row(truth=None)]):
        prompts = prepare_data.load_prompts(parquet(tmp_path, rows), tokenizer, 512, need_truth=False)
        assert [p["ground_truth"] for p in prompts] == [None] * len(rows)


def test_zero_is_a_ground_truth(tmp_path, tokenizer):
    path = parquet(tmp_path, [row(truth=0)])
    assert prepare_data.load_prompts(path, tokenizer, 512)[0]["ground_truth"] == 0


def test_no_data_source(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="1 rows have no name in 'data_source', first rows .1.:"):
        prepare_data.load_prompts(parquet(tmp_path, [row(), row(data_source=None)]), tokenizer, 512)


def test_unreadable_files(tmp_path, tokenizer):
    path = parquet(tmp_path, [row()])
    half = open(path, "rb").read()[:-20]
    (tmp_path / "half.parquet").write_bytes(half)
    (tmp_path / "text.parquet").write_text("question,answer\n")
    for name in ("half", "text"):
        with pytest.raises(ValueError, match=f"{name}.parquet is not a readable .parquet file"):
            prepare_data.load_prompts([path, str(tmp_path / f"{name}.parquet")], tokenizer, 512)
    with pytest.raises(FileNotFoundError, match="none.parquet does not exist"):
        prepare_data.load_prompts(str(tmp_path / "none.parquet"), tokenizer, 512)
    with pytest.raises(ValueError, match="empty.parquet has no rows"):
        empty = str(tmp_path / "empty.parquet")
        pq.write_table(pa.Table.from_pylist([row()]).slice(0, 0), empty)
        prepare_data.load_prompts(empty, tokenizer, 512)


def test_template_without_system_role(tmp_path):  # fault 19
    strict = prepare_data.demo_tokenizer()
    strict.chat_template = ("{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
                            + strict.chat_template)
    with_system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    path = parquet(tmp_path, [row(prompt=with_system), row("3+3?"), row(prompt=with_system)])
    with pytest.warns(UserWarning, match="no system role") as caught:
        prompts = prepare_data.load_prompts(path, strict, 512)
    assert len(caught) == 1
    assert prompts[0]["prompt"] == prompts[2]["prompt"] == [{"role": "user", "content": "Be brief.\n\n2+2?"}]
    assert prompts[0]["prompt_ids"] == [BOS, USER, *ids_of("Be brief.\n\n2+2?", strict), EOS, ASSISTANT]
    assert prompts[1]["prompt"] == [{"role": "user", "content": "3+3?"}]
    accepting = prepare_data.demo_tokenizer()
    assert prepare_data.load_prompts(path, accepting, 512)[0]["prompt"] == with_system


def test_no_chat_template(tmp_path):
    base = prepare_data.demo_tokenizer()
    base.chat_template, base.name_or_path = None, "some/base-model"
    with pytest.raises(ValueError, match="some/base-model has no chat template: use the model's instruct version"):
        prepare_data.load_prompts(parquet(tmp_path, [row()]), base, 512)


# ---------------------------------------------------------------------------------------------------------------------
# Order


def test_fewer_rows_than_a_batch(tmp_path, tokenizer, capsys):  # fault 21
    path = parquet(tmp_path, [row()] * 10)
    with pytest.raises(ValueError, match="^10 rows < train_batch_size 16"):
        prepare_data.load_prompts(path, tokenizer, 512, min_rows=16)
    with pytest.raises(ValueError, match="^10 rows < train_batch_size 16"):
        prepare_data.batch_rows(10, 16, seed=0, step=0)
    with pytest.raises(ValueError, match="^0 rows .*10 longer than 2 tokens filtered"):
        prepare_data.load_prompts(path, tokenizer, 2)
    prepare_data.load_prompts([path] * 4, tokenizer, 512, min_rows=16)
    assert "40 prompts from" in (out := capsys.readouterr().out) and "2 steps an epoch, 8 rows left out of each" in out


def test_order_depends_on_seed_and_epoch_only():  # fault 22
    first, second = prepare_data.epoch_order(6, 3, 0), prepare_data.epoch_order(6, 3, 1)
    np.random.seed(1)
    np.random.rand(5)
    assert first.tolist() != second.tolist() != prepare_data.epoch_order(6, 4, 1).tolist()
    assert prepare_data.epoch_order(6, 3, 0).tolist() == first.tolist()
    assert prepare_data.epoch_order(6, 3, 1).tolist() == second.tolist()
    assert sorted(first) == sorted(second) == list(range(6))
    code = "import prepare_data; print(prepare_data.epoch_order(6, 3, 1).tolist())"
    folder = os.path.dirname(prepare_data.__file__)
    assert json.loads(subprocess.check_output([sys.executable, "-c", code], cwd=folder)) == second.tolist()


def test_batches_drop_the_rest_and_resume_anywhere():  # faults 21 and 22
    steps = [prepare_data.batch_rows(40, 16, seed=3, step=step).tolist() for step in range(4)]
    assert [len(step) for step in steps] == [16] * 4
    assert steps[0] + steps[1] == prepare_data.epoch_order(40, 3, 0)[:32].tolist()
    assert steps[2] + steps[3] == prepare_data.epoch_order(40, 3, 1)[:32].tolist()  # step 2 opens the next epoch
    assert prepare_data.batch_rows(40, 16, seed=3, step=3).tolist() == steps[3]  # no earlier step is needed


# ---------------------------------------------------------------------------------------------------------------------
# Demo


def test_demo_rows(demo, tokenizer):
    train, test = (prepare_data.load_prompts(str(demo / f"{s}.parquet"), tokenizer, 64) for s in ("train", "test"))
    assert (len(train), len(test)) == (353, 88)  # 441 sums, a fifth held out
    questions = [p["prompt"][0]["content"] for p in train + test]
    assert set(questions) == {f"what is {a}+{b}?" for a in range(21) for b in range(21)} and len(questions) == 441
    for p in train + test:
        a, b = p["prompt"][0]["content"][8:-1].split("+")
        assert p["ground_truth"] == str(int(a) + int(b)) and p["data_source"] == "demo/arithmetic"


def test_demo_model_reloads_and_is_warm(demo):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(demo / "model")
    reloaded = AutoTokenizer.from_pretrained(demo / "model")
    assert len(reloaded) == model.config.vocab_size == model.get_input_embeddings().num_embeddings
    assert model.config.tie_word_embeddings and model.config.hidden_size // model.config.num_attention_heads == 32
    assert 400_000 < model.num_parameters() < 700_000
    special = [reloaded.pad_token_id, reloaded.bos_token_id, reloaded.eos_token_id]
    assert special == [0, BOS, EOS] == [getattr(model.config, f"{name}_token_id") for name in ("pad", "bos", "eos")]
    assert GenerationConfig.from_pretrained(demo / "model").eos_token_id == EOS
    text = 'A "quoted" line,\n\twith  1.5 + 2 = {3}?'
    assert reloaded.decode(ids_of(text, reloaded)) == text

    prompts = prepare_data.load_prompts(str(demo / "test.parquet"), reloaded, 64)
    greedy, sampled = prepare_data.demo_accuracy(model, *prepare_data.demo_batch(prompts, reloaded))
    assert 0.30 <= greedy <= 0.48 and 0.15 <= sampled <= greedy

    # The teacher-forced number is what decoding gives.
    right = 0
    for prompt in prompts[:20]:
        ids = torch.tensor([prompt["prompt_ids"]])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        right += out.tolist() == ids_of(f"#### {prompt['ground_truth']}", reloaded) + [EOS]
    forced, _ = prepare_data.demo_accuracy(model, *prepare_data.demo_batch(prompts[:20], reloaded))
    assert right == round(20 * forced)
