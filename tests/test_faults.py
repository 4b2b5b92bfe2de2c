"""Hostile text against the reward code, and those of the public faults that lie between two stages."""
import itertools
import json
import math
import os
import random
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import grpo
import reward
import rollout
from prepare_data import demo_tokenizer
from test_rollout import EOS, change, make_args, make_engine, process_group, random_prompts, save_model, without_memory  # noqa: F401

SLOW = bool(os.environ.get("SLOW"))
GSM8K_METHODS = [m for m in reward.METHODS if m != "math"]
REAL = [c["response"] for name in ("gsm8k_reward", "math_reward")
        for c in json.loads((Path(os.environ.get("VECTORS", Path(__file__).parent / "vectors")) / f"{name}.json").read_text())["cases"]]
FRAGMENTS = [
    *"0123456789", *"+-*/^=.,:;%$€£(){}[]<>|\\_~'\"!?&#@`", *" \t\n\r\v\f\0", *"eExXoO", "#### ", "####", "### ", "#### Step 3: ", "**", "\r\n", "\u2028", "\x85",
    r"\boxed{", r"\boxed", r"\fbox{", r"\frac{", r"\frac", r"\dfrac12", r"\tfrac{1}{2}", r"\sqrt{", r"\text{", r"\textbf {", r"\mathrm{", r"\left(", r"\right)", r"\times", r"\cdot",
    r"\,", r"\!", r"\;", r"\%", r"\$", r"\\", r"\(", r"\]", r"^\circ", r"\pi", r"\infty", r"\pm", r"\begin{pmatrix}", r"\end{pmatrix}", r"\overline{3}", "{,}", "10^{", "}{", "}}",
    "18", "-7", "1,250", "1.000,5", "12,50", "3/4", "1 1/2", "1/0", "0/0", "0^-1", "0^0", "2^400", "9^9^9", "1e400", "1e-400", "1E+308", "1e999999999", "0x12", "1_000", "5-8", "18:30",
    "7:00", ".5", "5.", "1..2", "1.2.3", "--5", "+-5", "1 000", "1,0,0", "nan", "inf", "-inf", "Infinity", "None", "True", "1j", "answer is ", "answer: ", " or ", " and ", " to ", " dollars", "eighteen",
    "−", "–", "—", "½", "¾", "²", "³", "₁", "①", "Ⅷ", "٣", "१", "１", "𝟙", "𝟘", "፩", "〇", "百", "٫", "٬", "’", "…", "∞", "π", "√", "×", "÷", "⁄", "°", "‰", "所以答案是",
    "\u00a0", "\u2009", "\u202f", "\u200b", "\u200d", "\ufeff", "\u202e", "\u0301", "\ufffd", "\ud800", "\udfff", "\U0010ffff", "\ue000", "😀", "👨‍👩‍👧", "ß", "İ", "ŉ", "ﬁ", "Ǆ"]

CPU = torch.device("cpu")

# ---- hostile text

def hostile(rng):
    """Fragments, now and then one repeated very often; or a real response with pieces cut, doubled and put in."""
    if rng.random() < 0.3:
        text = rng.choice(REAL)
        for _ in range(rng.randrange(1, 6)):
            a, b = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
            text = rng.choice((text[:a] + text[b:], text[:b] + text[a:], text[:a] + rng.choice(FRAGMENTS) + text[a:]))
            text = text[:5000]
        return text
    parts = []
    for _ in range(rng.randrange(1, 14)):
        part = rng.choice(FRAGMENTS) if rng.random() < 0.9 else chr(rng.randrange(0x110000))
        if (luck := rng.random()) < 0.08:
            part *= rng.randrange(2, 40)
        elif luck < 0.1:  # two that alternate, past the length that is read at an answer
            part = (part + rng.choice(FRAGMENTS)) * rng.randrange(100, 600)
        elif luck < 0.1003:
            part *= 300_000 // len(part)
        parts.append(part)
    return "".join(parts)


def grade_hostile(seed, count):
    """Grade `count` strings by every method in turn -> (seconds of CPU, method, string) of the slowest, scores that were given."""
    rng, slowest, scores = random.Random(seed), (0.0, "", ""), {0.0: 0, 1.0: 0}
    for i, method in zip(range(count), itertools.cycle(GSM8K_METHODS)):
        text, truth = hostile(rng), "18"
        if i % 50 == 0:
            truth = hostile(rng)[:1000]
        start = time.thread_time()
        try:
            score, answered = reward.grade(text, truth, method)
        except ValueError as error:  # an unreadable truth, and nothing else
            assert truth != "18" and str(error).startswith("ground truth "), (method, text, truth)
            continue
        except BaseException as error:
            raise AssertionError((method, text, truth)) from error
        slowest = max(slowest, (time.thread_time() - start, method, text))
        assert score in (0.0, 1.0) and answered in (True, False) and answered >= score, (method, text, truth)
        scores[score] += 1
    return slowest, scores


def test_hostile_text():
    slowest, scores = grade_hostile(seed=1, count=25_000)
    assert min(scores.values()) > 100  # both verdicts occur


@pytest.mark.skipif(not SLOW, reason="minutes; SLOW=1 runs it")
def test_a_million_hostile_texts():
    (seconds, method, text), scores = grade_hostile(seed=2, count=1_000_000)
    print(f"slowest: {1000 * seconds:.1f} ms, {method}, {len(text)} characters, {text[:100]!r}; scores {scores}")
    assert seconds < 0.05


def test_hostile_text_for_math():
    """math-verify may take for ever over a tower of powers; that is the error of that item alone."""
    rng = random.Random(3)
    texts = [hostile(rng) for _ in range(10_000 if SLOW else 500)]
    good = {"data_source": "math", "solution_str": r"\boxed{18}", "ground_truth": "18"}
    with reward.Scorer("math", workers=1, timeout=2) as scorer:
        scores = scorer.score([x for text in texts for x in ({**good, "solution_str": text}, good)])
    assert [(s.score, s.error) for s in scores[1::2]] == [(1.0, None)] * len(texts)
    errors = [s for s in scores if s.error]
    print(f"{len(errors)} of {len(texts)} in error")
    assert all("time limit of 2 s" in s.error and math.isnan(s.score) for s in errors) and len(errors) < 0.02 * len(texts)


# ---- from the engine to the trainer

def test_what_was_sampled_is_trained_on(tmp_path):  # fault 25
    """Two ids that decode to a text which encodes to one."""
    tokenizer = demo_tokenizer()
    text = tokenizer.decode([11, 12])
    tokenizer.add_tokens([text])
    assert len(tokenizer.encode(text)) == 1
    save_model(tmp_path, "llama untied", without_memory)
    samples = make_engine(make_args("hf"), tmp_path).generate([[10]], rollout.Sampling(max_tokens=4), [0])
    class EchoScorer:
        def score(self, items):
            return [item["solution_str"] for item in items]
    assert rollout.score(EchoScorer(), tokenizer, samples, [{"data_source": "", "ground_truth": "", "extra_info": {}}]) == ([text], [text])
    inputs, labels = grpo.pack(samples, CPU)
    assert inputs["input_ids"].tolist() == [[10, 11, 12, EOS]] and labels.tolist() == [11, 12, EOS] and len(samples[0].logp) == 3


def test_left_padding_changes_nothing(process_group, tmp_path):  # fault 31
    save_model(tmp_path, "llama untied")
    engine, sampling = make_engine(make_args("hf"), tmp_path), rollout.Sampling(max_tokens=6)
    prompts = [random_prompts(1, length)[0] for length in (3, 5, 40)]
    together = engine.generate(prompts, sampling, [0, 1, 2])
    for i, sample in enumerate(together):
        [alone] = engine.generate(prompts[i:i + 1], sampling, [i])
        assert sample.response_ids == alone.response_ids and sample.logp == pytest.approx(alone.logp, abs=1e-5)
    inputs, _ = grpo.pack([rollout.Sample([5, 6], [7], "stop", None), rollout.Sample([5], [7, 8, 9], "stop", None)], CPU)
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3]]  # the trainer has no padding at all


def test_greedy_after_new_weights_is_a_fresh_engines(process_group, tmp_path):  # fault 46; vLLM's prefix cache: test_rollout.py
    save_model(tmp_path / "old", "llama tied")
    args, prompts, greedy = make_args("hf"), random_prompts(3, 30), rollout.Sampling(temperature=0, max_tokens=8)
    engine, model = make_engine(args, tmp_path / "old"), grpo.load_model(tmp_path / "old", args, CPU)
    before = engine.generate(prompts, greedy, [0, 1, 2])
    change(torch.optim.AdamW(model.parameters(), lr=0.03), 0)
    engine.update_weights(model)
    weights = dict(rollout.full_weights(model, torch.float32, "cpu"))
    save_model(tmp_path / "new", "llama tied", lambda fresh: fresh.load_state_dict(weights, strict=False))
    after, fresh = engine.generate(prompts, greedy, [0, 1, 2]), make_engine(args, tmp_path / "new").generate(prompts, greedy, [0, 1, 2])
    assert after == fresh and before != after


# ---- master weights

def test_small_updates_are_not_lost(process_group, tmp_path):  # fault 63
    """1.0 - 100 * 1e-6, which bf16 weights round back to 1.0 each time."""
    save_model(tmp_path, "llama untied")
    args = make_args("hf")
    args.dtype = "bf16"
    model = grpo.load_model(tmp_path, args, CPU)
    weight = model.model.norm.weight
    optimizer = torch.optim.SGD([weight], lr=1e-6)
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert weight.dtype == torch.float32 and weight.full_tensor().tolist() == pytest.approx([0.9999] * 128, abs=5e-6)
    assert torch.tensor(1.0, dtype=torch.bfloat16) - 1e-6 == 1.0
