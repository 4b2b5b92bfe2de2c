"""Hostile text against the reward code: seeded generation of strings that look like answers until one reads them."""
import itertools
import json
import math
import os
import random
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import reward

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
