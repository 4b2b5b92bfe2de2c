"""Rule rewards against the vectors (verl's outputs, a careful teacher's verdicts); the scorer against bad functions."""
import json
import math
import os
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import reward

VECTORS = Path(os.environ.get("VECTORS", Path(__file__).parent / "vectors"))


def cases(name):
    return json.loads((VECTORS / name).read_text())["cases"]


def grade(response, truth, method="robust"):
    return reward.grade(response, truth, method)[0]


def item(response, truth="18", source="openai/gsm8k", **extra_info):
    return {"data_source": source, "solution_str": response, "ground_truth": truth, "extra_info": extra_info}


# ---- vectors

def test_robust_agrees_with_the_teacher():
    rows = cases("gsm8k_reward.json")
    wrong = [(c, score) for c in rows if (score := grade(c["response"], c["gold"])) != c["right"]]
    assert len(wrong) <= 0.05 * len(rows), wrong  # 1 of 64: "eighteen" in words
    assert all(score == 0 for _, score in wrong), wrong  # no wrong answer passes, not even a debatable one


def test_verl_strict_is_verl():
    for c in cases("gsm8k_reward.json"):
        assert grade(c["response"], c["gold"], "verl_strict") == c["verl_strict"], c


def test_math_is_math_verify():
    for c in cases("math_reward.json"):  # which is the teacher's verdict in 56 of 59
        assert grade(c["response"], c["gold"], "math") == c["math_verify"], c


# ---- faults seen in public, each with its number

@pytest.mark.parametrize("response, truth, score", [
    ("6*7=42\n#### 42\n" + 120 * "ok. ", "42", 1),                     # fault 1: marker far from the end
    ("#### 15\nWait, I forgot the tip.\n#### 18", "18", 1), ("#### 15\nWait, I forgot the tip.\n#### 18", "15", 0),  # fault 2
    ("#### $1,250", "1250", 1), (r"#### \$1,250", "1250", 1), ("#### 1,250 dollars", "1250", 1),
    ("#### 12,50", "1250", 0), ("#### 12,50", "12.5", 0), ("#### 12,50", "50", 0),  # fault 3: malformed grouping is not read
    ("#### ,", "0", 0),  # fault 5
    ("#### -7", "-7", 1), ("#### -7", "7", 0), ("#### −7", "7", 0), ("#### - 7", "-7", 1), ("#### -$7", "-7", 1),  # fault 6
    ("#### 3/4", "0.75", 1), ("#### 3/4", "3", 0), ("#### 3/4", "4", 0), (r"#### \frac{3}{4}", "0.75", 1),
    (r"#### -\frac34", "-0.75", 1), (r"#### 1\frac{3}{4}", "1.75", 1), ("#### -1 1/2 cups", "-1.5", 1), ("#### 1½", "1.5", 1), ("#### ½", "0.5", 1),
    ("#### 12.5%", "12.5", 1), (r"#### 12.5\%", "12.5", 1), ("#### 12.5%", "0.125", 0), ("#### 6 eggs", "6", 1),  # fault 8
    ("", "", 0), ("#### ", "", 0), ("I can't say", None, 0), ("#### 0", None, 0),  # fault 16: an empty truth equals nothing
])
def test_public_faults(response, truth, score):
    assert grade(response, truth) == score


def test_no_number_is_no_answer():  # fault 5
    assert reward.grade("#### ,", "18", "robust") == reward.grade("#### .", "18", "flexible") == (0.0, False)


def test_an_unreadable_truth_is_not_a_wrong_answer():
    with pytest.raises(ValueError, match="ground truth 'five' is not a number"):
        grade("#### 5", "five")


@pytest.mark.parametrize("response, number", [
    ("20-7=13\n#### 13", "13"), ("range 5-8", "8"), ("So it is 45, and we stop , then .", "45"), ("we get 1.8 × 10^3", "1800"),
    ("half of it, i.e. 3/4.", "0.75"), ("...5", "5"), ("so x = -5", "-5"), ("所以答案是18。" * 200, "18"), ("18.", "18"),
])
def test_flexible_takes_the_last_number(response, number):  # faults 5 and 6
    assert reward.grade(response, number, "flexible") == (1.0, True)
    assert grade(response, number[1:] if number[0] == "-" else "-" + number, "flexible") == 0


@pytest.mark.parametrize("response, truth, score", [
    ("#### 9*2 = 18", "18", 1), ("#### 18 (since 9*2=18)", "18", 1), ("#### 18 = 9*2", "18", 1), ("#### 18 (3 boxes of 6)", "18", 1), ("#### 9*2", "9", 0),
    ("#### 5-8", "5", 0), ("#### 18 or 19", "18", 0), ("#### 5 hours 30 minutes", "5", 0), ("#### 18:30", "18", 0),
    (r"#### \sqrt{16}", "16", 0), (r"\boxed{\frac{\frac{1}{2}}{3}}", "1/6", 0), ("#### 1/0", "0", 0), ("#### 1.2.3", "1.2", 0),
    ("#### 1e999999999", "1", 0), ("#### 2^9999999", "2", 0), ("#### " + "9" * 500, "9" * 500, 0),  # beyond the bounds
    (r"#### 1.8 \times 10^{3}", "1800", 1), ("#### 10^{-2}", "0.01", 1), ("#### 18/hour", "18", 1), ("**#### 18**", "18", 1),
    ("#### After 3 days he has 18", "18", 1), ("#### The answer is $18 per day for 2 eggs", "18", 1),
    ("#### Step 3: add\nSo it is 18", "18", 1), ("#### Final Answer\n\\boxed{18}", "18", 1), ("\\boxed{18} at 20", "18", 1),
    (r"\boxed{10,\!000}", "10000", 1), (r"\boxed{1\,000 \text{ dollars}}", "1000", 1), ("#### 1\u202f000", "1000", 1),
])
def test_reading_an_answer(response, truth, score):
    assert grade(response, truth) == score


def test_methods_differ_in_where_they_look():
    boxed = [r"so \boxed{24}"] * 4
    assert [reward.grade(r, "24", "strict") for r in boxed] == [(0.0, False)] * 4
    assert [reward.grade(r, "24", "boxed") for r in boxed] == [(1.0, True)] * 4
    assert reward.grade("#### 18.", "18", "strict") == reward.grade("####18", "18", "strict") == (1.0, True)
    assert reward.grade("18", "18", "strict") == reward.grade("#### 18", "18", "boxed") == (0.0, False)
    assert reward.grade("#### 17", "18", "strict") == (0.0, True)
    with pytest.raises(ValueError, match="robust, strict"):
        reward.grade("18", "18", "exact")


def test_math_beyond_the_vectors():
    assert reward.grade(r"\boxed{18}", "", "math")[0] == reward.grade("", "", "math")[0] == 0
    assert reward.grade("no idea", "18", "math") == (0.0, False)
    assert reward.grade(r"\boxed{١٨}", "$18$", "math") == (1.0, True)
    assert reward.grade(r"\boxed{18}" + 5000 * " so", "18", "math") == (1.0, True)


def test_dispatch_by_data_source():
    for source in ("openai/gsm8k", "gsm8k", "demo/add"):
        assert reward.compute_score(source, "#### 18", "18") == 1.0
    for source in ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500",
                   "EleutherAI/hendrycks_math", "math_dapo", "aime2024"):
        assert reward.compute_score(source, r"\boxed{\frac{1}{2}}", "0.5") == 1.0
    with pytest.raises(ValueError, match=r"acme/quiz.*--reward_fn math\|robust\|path.py:function"):
        reward.compute_score("acme/quiz", "18", "18")
    assert reward.compute_score("acme/quiz", "18", "18", {}, method="flexible") == 1.0


MB = 10**6
HOSTILE = ["9" * MB, "#### " + "9" * MB, "#" * MB, "#### " * (MB // 5), "#### step " * (MB // 10), "#### " + " " * MB,
           "\\boxed{" * (MB // 7), "\\boxed" + "{" * MB, "\\boxed{}" * (MB // 8), "\\frac{" * (MB // 6) + "1", "," * MB,
           "#### " + "," * MB, "1," * (MB // 2), "#### 1" + " 000" * (MB // 4), "1/" * (MB // 2), " " * MB, "-" * MB, "#### " + "-" * MB + "5",
           "#### " + "1=" * (MB // 2), "1e99999999" * (MB // 10), "١" * MB]


@pytest.mark.parametrize("method", reward.METHODS)
def test_hostile_megabytes(method):
    with reward.Scorer(method, workers=1, timeout=20 if method == "math" else 5) as scorer:
        scores = scorer.score([item(response, "18") for response in HOSTILE])
    assert [(s.score, s.error) for s in scores] == [(0, None)] * len(HOSTILE)


# ---- the scorer

USER = """
    import math, os, signal, subprocess, sys, time
    print("imported")

    def score(data_source, solution_str, ground_truth, extra_info):
        print("scoring", solution_str)
        subprocess.run(["echo", "and from a child"])
        match solution_str:
            case "hang": time.sleep(3600)
            case "die": os._exit(7)
            case "kill": os.kill(os.getpid(), signal.SIGKILL)
            case "kill group": os.killpg(0, signal.SIGKILL)
            case "abort": os.abort()
            case "raise": raise KeyError("boom")
            case "exit": sys.exit(3)
            case "hog": return len(bytearray(10 * 2**30))
            case "grow": return len([bytes(2**26) for _ in range(160)])
            case "nan": return math.nan
            case "inf": return {"score": math.inf}
            case "string": return "1.0"
            case "none": return None
            case "dict": return {"fmt": 1}
            case "mixed": return {"score": 0.5, "fmt": 1, "why": "ok", "no_answer": True}
        return float(solution_str == ground_truth)

    def other(**kwargs):
        assert sorted(kwargs) == ["data_source", "extra_info", "ground_truth", "solution_str"]
        return {"score": kwargs["extra_info"]["a"]}

    constant = 3
"""


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    path = tmp_path_factory.mktemp("user") / "mine.py"
    path.write_text(textwrap.dedent(USER))
    return path


def test_a_bad_item_costs_only_itself(user):  # fault 14: NaN, inf and a string are errors of the item; 10: an exception is no wrong answer
    bad = {"hang": "time limit of 0.7 s", "die": "exit code 7", "raise": r"KeyError: 'boom' (mine.py:14)", "exit": "SystemExit: 3",
           "kill": "exit code -9", "kill group": "exit code -9", "abort": "exit code -6", "hog": "memory limit of 1 GiB", "grow": "memory limit of 1 GiB",
           "nan": "'nan' (float), not a finite", "inf": "'inf' (float), not a finite",
           "string": "'1.0' (str), not a finite number", "none": "(NoneType)", "dict": "dict without 'score', only ['fmt']"}
    with reward.Scorer(f"{user}:score", timeout=0.7, memory_gb=1) as scorer:
        for _ in range(2):  # again: the restarted workers work
            responses = [r for name in bad for r in ("18", name, "17")]
            scores = scorer.score([item(r) for r in responses])
            for i, (r, s) in enumerate(zip(responses, scores)):
                if r in bad:
                    assert math.isnan(s.score) and s.error.startswith(f"item {i}: ") and bad[r] in s.error, (r, s)
                else:
                    assert (s.score, s.error) == (float(r == "18"), None), (r, s)
        assert reward.summarize(scores)["reward/error_frac"] == pytest.approx(1 / 3)


def test_mixed_returns(user):  # fault 12
    with reward.Scorer(f"{user}:score") as scorer:
        scores = scorer.score([item("18"), item("mixed"), item("17"), item("dict")])
        assert scorer.score([]) == []
    assert [s.score for s in scores[:3]] == [1, 0.5, 0] and "item 3" in scores[3].error
    assert [s.extra.get("fmt") for s in scores] == [None, 1, None, None] and scores[1].extra["why"] == "ok"
    assert reward.summarize(scores[:3]) == {"reward/no_answer_frac": 1 / 3, "reward/error_frac": 0, "reward/fmt": 1}


def test_items_reach_the_function_by_name(user):
    with reward.Scorer(f"{user}:other", workers=1) as scorer:
        assert scorer.score([item("x", a=0.25)])[0].score == 0.25


@pytest.mark.parametrize("reward_fn, message", [
    ("robsut", "robsut is unknown; take auto, robust, .*path.py:function"),
    ("nowhere.py:score", "there is no file nowhere.py"),
    ("{}:scoer", "has no function 'scoer'; take one that it has: score, other"),
    ("{}:constant", "has no function 'constant'"),
    ("{broken}:score", r"broken.py can't be imported, .*ModuleNotFoundError: No module named 'no_such_module'"),
    ("{exits}:score", "hung or ended while importing"),
])
def test_a_function_that_cannot_be_loaded(user, reward_fn, message):
    (user.parent / "broken.py").write_text("import no_such_module\n")
    (user.parent / "exits.py").write_text("raise SystemExit(1)\n")
    reward_fn = reward_fn.format(user, broken=user.parent / "broken.py", exits=user.parent / "exits.py")
    with pytest.raises(ValueError, match=message):
        reward.Scorer(reward_fn)


def test_any_thread_may_score():  # fault 10
    with reward.Scorer() as scorer, ThreadPoolExecutor(4) as threads:
        batches = list(threads.map(lambda n: scorer.score([item("#### 5", str(5 + n)), item("#### 5", "5")]), range(4)))
    assert [[s.score for s in b] for b in batches] == [[1, 1], [0, 1], [0, 1], [0, 1]]
    assert all(reward.summarize(b)["reward/error_frac"] == 0 for b in batches)


def test_math_in_an_auto_scorer_despite_a_short_limit_and_unknown_sources():
    with reward.Scorer(workers=1, timeout=0.5) as scorer:  # importing math-verify takes longer than that
        scores = scorer.score([item(r"\boxed{2\sqrt{3}}", r"\sqrt{12}", "HuggingFaceH4/MATH-500"), item("#### 18"),
                               item("18", source="acme/quiz"), item(r"\boxed{" + "2^" * 400 + "2}", "18", "math_dapo")])
    assert [s.score for s in scores[:2]] == [1, 1] and "acme/quiz" in scores[2].error and "time limit" in scores[3].error


def test_no_answer_is_reported_and_warned_of():  # fault 9
    responses = [item(r"\boxed{24}", "24")] * 4
    with reward.Scorer("strict") as scorer:
        scores = scorer.score(responses)
        assert [s.score for s in scores] == [0, 0, 0, 0]
        with pytest.warns(UserWarning, match="none of 4 responses"):
            assert reward.summarize(scores)["reward/no_answer_frac"] == 1
        mixed = scorer.score([*responses, item("#### 17")])
    assert reward.summarize(mixed) == {"reward/no_answer_frac": 0.8, "reward/error_frac": 0}
    with reward.Scorer("boxed") as scorer:
        assert [s.score for s in scorer.score(responses)] == [1, 1, 1, 1]


def test_workers_end_with_the_trainer():
    code = "import os, reward; s = reward.Scorer(); print(*[p.pid for p, _ in s.workers], flush=True); os._exit(9)"
    pids = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
                          cwd=Path(reward.__file__).parent).stdout.split()
    deadline = time.monotonic() + 10
    while running := [p for p in pids if Path(f"/proc/{p}").exists() and ") Z" not in Path(f"/proc/{p}/stat").read_text()]:
        assert time.monotonic() < deadline, running
    assert len(pids) == 2
