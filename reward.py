r"""Response + ground truth -> score: rule rewards, a user's own function, and worker processes that run either.

    reward.compute_score("openai/gsm8k", "6 * 3 = 18\n#### 18", "18")   # 1.0
    scorer = reward.Scorer("my_reward.py:score")                        # what the training scripts use
    scorer.score([{"data_source": ..., "solution_str": ..., "ground_truth": ..., "extra_info": ...}])

`--reward_fn` takes one of these names, or `path.py:function` with verl's signature (called by keyword):

    auto         by data_source: GSM8K -> robust; MATH, AIME -> math
    robust       last `####`, else last \boxed{}, else last number; compares values, not strings
    strict       last `####` only           boxed    last \boxed{} only           flexible    last number only
    verl_strict  verl's GSM8K rule to the letter: last 300 characters, `#### ` and a number, equality of strings
    math         math-verify: LaTeX expressions, sets, intervals
"""
import importlib.util
import json
import logging
import math
import multiprocessing.connection
import os
import pickle
import re
import resource
import signal
import subprocess
import sys
import threading
import traceback
import unicodedata
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product

METHODS = ("robust", "strict", "boxed", "flexible", "verl_strict", "math")
GSM8K_SOURCES = r"(openai/)?gsm8k|demo/"
MATH_SOURCES = r"math$|math_dapo|aime|(lighteval|DigitalLearningGmbH|HuggingFaceH4|EleutherAI)/(hendrycks_)?(math|aime)"
LIMIT = 400        # characters read at an answer: bounds the work on a hostile response and the digits of a number
START_LIMIT = 300  # seconds that a worker may take to import the reward function

# ---- where the answer stands: a short piece of the response, found in time linear in its length

CUTTABLE = "0123456789.,/^*+-eE \n"  # at a cut, what may be part of a severed number


def first_line(text):
    line = text[:LIMIT].split("\n")[0]
    return line.rstrip(CUTTABLE) if len(line) == LIMIT else line


def find_marked(response):
    tail = response.rpartition("####")[2].lstrip() if "####" in response else ""
    return "" if re.match(r"step\b", tail, re.I) else first_line(tail)  # `#### Step 3` is a Markdown heading


def find_boxed(response):
    tail = response.rpartition("\\boxed")[2].lstrip() if "\\boxed" in response else ""
    depth = 0
    for i, c in enumerate(tail[:LIMIT]):
        depth += (c == "{") - (c == "}")
        if c == "}" and depth <= 0:
            return tail[:i]
    return first_line(tail)


def find_last(response):
    digit = re.search(r"\d", response[::-1])
    if not digit:
        return ""
    end = len(response) - digit.start()
    window = response[max(0, end - LIMIT):end + 8]  # + 8: the closing brace of a \frac
    numbers = list(VALUE.finditer(plain(window.lstrip(CUTTABLE) if end > LIMIT else window)))
    return numbers[-1][0] if numbers else ""


# ---- which number it is

CHARACTERS = str.maketrans(dict.fromkeys("−–—‐‑－", "-") | dict.fromkeys("\u00a0\u2007\u2009\u202f\t~", " ")
                           | dict.fromkeys("×·⋅", "*") | dict.fromkeys("÷⁄∕", "/") | dict.fromkeys("$€£¥₹`°", "")
                           | {"½": " 1/2", "¼": " 1/4", "¾": " 3/4", "٫": ".", "٬": ","})
REWRITES = [(re.compile(pattern), to) for pattern, to in (
    (r"\\(?:text|math|mbox|emph)[a-z]*\s*\{([^{}]*)\}", r" \1 "),
    (r"(?<=\d) ?(?=\\[dtc]?frac)", " "),                          # 1\frac{3}{4} is a mixed number
    (r"\\[dtc]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r"\1/\2"),
    (r"\\[dtc]?frac\s*(\d)\s*(\d)", r"\1/\2"),
    (r"\\times|\\cdot", "*"),
    (r"\^? ?\\circ|\\!", ""),
    (r"\\(?:boxed|left|right|displaystyle|q?quad|[,;: ])", " "),
    (r"\\(?![A-Za-z])", ""),                                      # \$ \% \( \[
    (r"(?<=\d) ?\*\* ?(?=\d)", "^"),
    (r"\*\*|[{}]", ""),                                           # bold, 1{,}000, 10^{3}
    (r" +", " "),
    (r"(?:^|(?<==)) ?([-+]) ?(?=[.\d])", r"\1"),                  # "= - 5"
    (r"(?<![\d.,])\d{1,3}(?: \d{3})+(?! ?[\d/])", lambda m: m[0].replace(" ", "")),  # 1 000
)]
NUMBER = r"(?:(?<![\w.])\.)?\d(?:[\d.,]*\d)?"
VALUE = re.compile(  # a minus glued to a digit, word or bracket before it is an operator or a dash: 20-7, (1)-2, day-3
    rf"(?P<sign>(?<![\w)%+-])(?<![\d)%] )[-+]+)?(?:(?P<whole>\d+) (?=\d+ ?/ ?\d))?(?P<number>{NUMBER})"
    rf"(?: ?/ ?(?P<divisor>{NUMBER})| ?\^ ?(?P<power>[-+]?\d+)|(?: ?\* ?10 ?\^ ?|[eE])(?P<exponent>[-+]?\d+))?"
    r"(?::00(?!\d))?")
MORE = re.compile(  # follows what is not one number: 9*2, 5-8, 18:30, 18 or 19, 5 hours 30 minutes
    r" ?(?:(?:[-+*/^:,;x]|or|and|to) ?\(?)?[-+.]?\d| ?[A-Za-z%]+ (?:(?:or|and|to) )?[-+.]?\d")


def ascii_digits(text):
    return "".join(str(unicodedata.decimal(c)) if c.isdecimal() else c for c in text)


def plain(text):
    """Rewrite LaTeX and typography to ASCII arithmetic, as far as numbers go."""
    text = ascii_digits(text).translate(CHARACTERS)
    for pattern, to in REWRITES:
        text = pattern.sub(to, text)
    return text


def decimal(digits):
    if not re.fullmatch(r"(?:\d{1,3}(?:,\d{3})+|\d*)(?:\.\d+)?", digits):
        raise ValueError(digits)  # 12,50 and 1.000,5 are different numbers to different readers, so neither is right
    return Fraction(digits.replace(",", ""))


def read_number(text):
    """Return the one number that an answer states, as an exact Fraction, or None.

    Units, currency and % are dropped (18% is 18). Of "9*2 = 18" the last side that is a number counts; an answer that
    opens with words ends with its number ("after 3 days 18"). A range, a list or unfinished arithmetic is no number.
    """
    for part in reversed(re.split(r"=|\banswer(?: is\b|:)", plain(text[:LIMIT]), flags=re.I)):
        numbers = list(VALUE.finditer(part))
        if not numbers:
            continue
        m = numbers[-1 if re.search(r"[^\W\d_]", part[:numbers[0].start()]) else 0]
        if "\\" in part or MORE.match(part, m.end()):  # a command that is left over, say \sqrt, changes the value
            continue
        power, exponent = int(m["power"] or 1), int(m["exponent"] or 0)
        if max(abs(power), abs(exponent)) > LIMIT:
            return None
        try:
            value = decimal(m["number"]) ** power * Fraction(10) ** exponent / decimal(m["divisor"] or "1")
        except (ValueError, ZeroDivisionError):
            return None
        value += int(m["whole"] or 0)
        return -value if (m["sign"] or "").count("-") % 2 else value
    return None


# ---- scores

FINDERS = {"robust": (find_marked, find_boxed, find_last), "strict": (find_marked,), "boxed": (find_boxed,),
           "flexible": (find_last,)}


def grade(response, ground_truth, method):
    """Grade one response by a named method -> (score 0.0 or 1.0, whether an answer was found).

    An empty ground truth scores 0. ValueError for one that the method can't read, and whatever math-verify raises:
    neither may pass for a wrong answer. There is no time limit here; Scorer has one.
    """
    truth = "" if ground_truth is None else str(ground_truth).strip()
    if method == "math":
        return grade_math(response, truth)
    if method == "verl_strict":
        found = re.findall(r"#### (-?[0-9.,]+)", response[-300:])
        return float(bool(found and truth) and found[-1].replace(",", "") == truth), bool(found)
    if method not in FINDERS:
        raise ValueError(f"reward method {method!r} is unknown; take one of {', '.join(METHODS)}")
    gold = read_number(truth)
    if truth and gold is None:
        raise ValueError(f"ground truth {truth[:80]!r} is not a number; use --reward_fn math or path.py:function")
    for find in FINDERS[method]:
        answer = plain(find(response))
        if re.search(r"\d", answer):  # an unreadable marked answer is not replaced by a number from elsewhere
            value = read_number(answer)
            return float(value is not None and value == gold), value is not None
    return 0.0, False


def grade_math(response, truth):
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify  # imports sympy: slow
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off
    # 1000 characters before the last box too, because `\boxed{17} or \boxed{18}` is one answer with two values
    box = response.rfind("\\boxed")
    response = response[max(0, box - 1000):box + 1000] if box >= 0 else response[-2000:]
    # math-verify's own time limits need the main thread and turn into "wrong"; ours is outside the process
    options = {"parsing_timeout": None, "raise_on_error": True}
    gold = parse(f"\\boxed{{{truth.strip('$')}}}", [LatexExtractionConfig()], **options) if truth else []
    answer = parse(ascii_digits(response), [ExprExtractionConfig(), LatexExtractionConfig()], **options)
    failure = None
    for pair in product(gold, answer):  # expression and text of each; one pair may compare where another raises
        try:
            if verify(*pair, timeout_seconds=None, raise_on_error=True):
                return 1.0, True
        except Exception as e:
            failure = e
    if failure:
        raise failure
    return 0.0, bool(answer)


def method_for(data_source):
    """Name the method that `auto` takes for a data source; ValueError for one it doesn't know."""
    if re.match(GSM8K_SOURCES, str(data_source), re.I):
        return "robust"
    if re.match(MATH_SOURCES, str(data_source), re.I):
        return "math"
    raise ValueError(f"no reward is known for data_source {data_source!r}; give --reward_fn math|robust|path.py:function")


def compute_score(data_source, solution_str, ground_truth, extra_info=None, method="auto"):
    """Score one response by rule, with verl's signature -> float; errors as in `grade`."""
    return grade(solution_str, ground_truth, method_for(data_source) if method == "auto" else method)[0]


def load(reward_fn):
    """Turn a --reward_fn into f(data_source, solution_str, ground_truth, extra_info); ValueError if that fails.

    f returns a number, or a dict with "score" and, if it likes, "no_answer" and metrics of its own.
    """
    if reward_fn == "auto" or reward_fn in METHODS:
        def rule(data_source, solution_str, ground_truth, extra_info=None):
            method = method_for(data_source) if reward_fn == "auto" else reward_fn
            score, answered = grade(solution_str, ground_truth, method)
            return {"score": score, "no_answer": not answered}
        return rule
    path, colon, name = reward_fn.rpartition(":")
    if not colon:
        raise ValueError(f"--reward_fn {reward_fn} is unknown; take auto, {', '.join(METHODS)} or path.py:function")
    if not (path.endswith(".py") and os.path.isfile(path)):
        raise ValueError(f"--reward_fn {reward_fn}: there is no file {path} that ends in .py; correct the path")
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))  # so that the file can import its neighbours
    spec = importlib.util.spec_from_file_location("user_reward", path)
    module = sys.modules["user_reward"] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as e:
        raise ValueError(f"--reward_fn {reward_fn}: {path} can't be imported, correct it: {describe(e)}") from e
    if not callable(getattr(module, name, None)):
        functions = ", ".join(k for k, v in vars(module).items() if callable(v)) or "none"
        raise ValueError(f"--reward_fn {reward_fn}: {path} has no function {name!r}; take one that it has: {functions}")
    return getattr(module, name)


def describe(e):
    frame = traceback.extract_tb(e.__traceback__)[-1]
    return f"{type(e).__name__}: {str(e)[:500]} ({os.path.basename(frame.filename)}:{frame.lineno})"


# ---- the worker process: `python reward.py FD REWARD_FN TIMEOUT MEMORY_GB`. Guards against accidents, not malice.

def checked(result):
    extra = {}
    if isinstance(result, dict):
        if "score" not in result:
            raise ValueError(f"the reward function returned a dict without 'score', only {list(result)}")
        extra = dict(result)
        result = extra.pop("score")
    if not hasattr(result, "__float__") or not math.isfinite(float(result)):
        raise ValueError(f"the reward function returned {str(result)[:80]!r} ({type(result).__name__}), not a finite number")
    return {"score": float(result), "no_answer": bool(extra.pop("no_answer", False)), "extra": extra}


def work(fd, reward_fn, timeout, memory_gb):
    connection = multiprocessing.connection.Connection(int(fd))
    try:
        function = load(reward_fn)
        if reward_fn == "math":
            import math_verify  # noqa: F401
    except Exception as e:
        return connection.send(str(e))
    # Of writable memory, on top of what the imports hold; in address space torch alone maps many GB that it never touches
    limit = int(open("/proc/self/statm").read().split()[5]) * resource.getpagesize() + int(float(memory_gb) * 2**30)
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    connection.send("ready")
    while True:
        try:
            item = connection.recv_bytes()
        except EOFError:
            os._exit(0)  # the trainer is gone; threads that the function left behind must not keep us
        try:
            item = pickle.loads(item)
            if reward_fn == "auto" and "math_verify" not in sys.modules and method_for(item["data_source"]) == "math":
                connection.send("loading")
                import math_verify  # noqa: F401
                connection.send("ready")
            signal.alarm(math.ceil(float(timeout)) + 5)  # ends a hanging item whose trainer is gone
            reply = checked(function(data_source=item["data_source"], solution_str=item["solution_str"],
                                     ground_truth=item["ground_truth"], extra_info=item.get("extra_info")))
            # JSON, so that the trainer need not import what the function returns
            reply = json.dumps(reply, default=lambda x: x.tolist() if hasattr(x, "tolist") else str(x))
        except MemoryError:
            return connection.send(json.dumps({"error": f"memory limit of {memory_gb} GiB exceeded", "restart": True}))
        except BaseException as e:  # sys.exit() in a reward function is a fault of that item too
            reply = json.dumps({"error": describe(e)})
        signal.alarm(0)
        connection.send(reply)


# ---- the trainer's side

@dataclass
class Score:
    score: float = math.nan  # NaN: the item failed, which is not a score of 0
    error: str | None = None
    no_answer: bool = False
    extra: dict = field(default_factory=dict)


def receive(connection, seconds):
    if not connection.poll(seconds):
        raise TimeoutError
    return connection.recv()


class Scorer:
    """Runs a reward function in worker processes; an item that hangs, dies or raises costs only itself.

    timeout is seconds an item, memory_gb GiB a worker on top of its imports. ValueError if the function can't be loaded.
    Workers are fresh interpreters (a fork would copy the trainer's CUDA state and threads) and end with the trainer.
    Any thread may call score().
    """

    def __init__(self, reward_fn="auto", workers=2, timeout=10.0, memory_gb=4):
        self.reward_fn, self.timeout, self.memory_gb = reward_fn, timeout, memory_gb
        self.lock = threading.Lock()
        self.workers = [None] * workers  # (process, connection); None: to be started when an item needs it
        try:
            with ThreadPoolExecutor(workers) as threads:
                list(threads.map(self.start, range(workers)))
        except BaseException:
            self.close()
            raise

    def start(self, k):
        connection, theirs = multiprocessing.Pipe()
        arguments = [theirs.fileno(), self.reward_fn, self.timeout, self.memory_gb]
        process = subprocess.Popen(
            [sys.executable, "-u", os.path.abspath(__file__), *map(str, arguments)], pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL, stdout=2, start_new_session=True,  # what the function prints goes to our stderr
            env={"OMP_NUM_THREADS": "1"} | os.environ)  # a BLAS thread a core in each worker would slow all down
        theirs.close()
        self.workers[k] = process, connection
        try:
            message = receive(connection, START_LIMIT)
        except (TimeoutError, EOFError, OSError):
            message = f"--reward_fn {self.reward_fn}: its worker hung or ended while importing; see its output above"
        if message != "ready":
            self.stop(k)
            raise ValueError(message)

    def stop(self, k):
        (process, connection), self.workers[k] = self.workers[k], None
        os.killpg(process.pid, signal.SIGKILL)  # the group, for what the function started; not reaped yet, so still ours
        connection.close()
        return process.wait()

    def score_one(self, k, item):
        if self.workers[k] is None:
            self.start(k)
        connection, limit = self.workers[k][1], self.timeout
        try:
            connection.send(item)
            while (reply := receive(connection, limit)) in ("loading", "ready"):  # math-verify's import isn't the item's
                limit = START_LIMIT if reply == "loading" else self.timeout
        except TimeoutError:
            self.stop(k)
            return Score(error=f"time limit of {self.timeout:g} s exceeded")
        except (EOFError, OSError):
            return Score(error=f"the worker process died, exit code {self.stop(k)}")
        reply = json.loads(reply)
        if reply.pop("restart", False):
            self.stop(k)
        return Score(**reply)

    def score(self, items):
        """Score dicts of data_source, solution_str, ground_truth, extra_info -> list of Score in the same order."""
        scores = [None] * len(items)
        todo = iter(range(len(items)))  # shared: whichever worker is free takes the next item

        def drain(k):
            for i in todo:
                scores[i] = self.score_one(k, items[i])
                if scores[i].error:
                    scores[i].error = f"item {i}: {scores[i].error}"

        with self.lock, ThreadPoolExecutor(len(self.workers)) as threads:
            list(threads.map(drain, range(len(self.workers))))
        return scores

    def close(self):
        for k, worker in enumerate(self.workers):
            if worker:
                self.stop(k)

    __enter__ = lambda self: self
    __exit__ = lambda self, *_: self.close()


def summarize(scores):
    """Metrics of a list of Score: shares of items without an answer and in error, mean of each numeric extra.

    The mean is over the items that have the extra. Warns when no response at all has an answer, for then it is the
    method that doesn't fit the model's format, and training would go on in silence with every reward 0.
    """
    metrics = {"reward/no_answer_frac": sum(s.no_answer for s in scores) / max(len(scores), 1),
               "reward/error_frac": sum(s.error is not None for s in scores) / max(len(scores), 1)}
    for key in dict.fromkeys(key for s in scores for key in s.extra):
        values = [s.extra[key] for s in scores if isinstance(s.extra.get(key), (int, float))]
        if values:
            metrics[f"reward/{key}"] = sum(values) / len(values)
    if metrics["reward/no_answer_frac"] == 1:
        warnings.warn(f"none of {len(scores)} responses has an answer that the reward reads; look at one, then try "
                      "another --reward_fn (robust, boxed, flexible)")
    return metrics


if __name__ == "__main__":
    work(*sys.argv[1:])
