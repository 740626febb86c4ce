"""Runs the adversarial suite: `make redteam [ARGS="--seconds 300 --seed 7 --only framing,json-bodies"]`."""

from __future__ import annotations

import argparse
import json
import platform
import random
import signal
import sys
import tempfile
import time
from contextlib import nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from urllib.parse import urlsplit

from tests.redteam.attack import Attack, Budget, Report, Setting
from tests.redteam.authentication import authentication, foreign_streams
from tests.redteam.changing_files import bad_weights, crash_during_copy, tokenizer_regex
from tests.redteam.connections import exhaustion, sending_order, slow_readers, slow_senders
from tests.redteam.endless_input import endless_input, unfinished_bodies
from tests.redteam.framing import framing
from tests.redteam.http_client import Address
from tests.redteam.json_bodies import json_bodies
from tests.redteam.remote_metadata import remote_metadata
from tests.redteam.service import (
    REPOSITORY,
    Launcher,
    ServiceFailed,
    Target,
    descriptors,
    leaks_in,
    resident_bytes,
)
from tests.redteam.starvation import chat_templates, costly_requests, grammar_compilation, grammar_masks, long_texts
from tests.redteam.unpaid_work import unpaid_work

ATTACKS = (
    framing, json_bodies, authentication, foreign_streams, sending_order, exhaustion, costly_requests, long_texts,
    grammar_compilation, grammar_masks, chat_templates, slow_readers, slow_senders, tokenizer_regex, crash_during_copy,
    bad_weights, remote_metadata, unpaid_work, endless_input, unfinished_bodies,
)  # fmt: skip
MEMORY_SLACK = 128 << 20
DESCRIPTOR_SLACK = 16


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 if every attack is refused, 1 if one succeeds, 2 for a wrong command, 130 for Ctrl+C."""
    options = parse(arguments)
    machine = f"Python {platform.python_version()}, {platform.machine()}"
    listed = ",".join(attack.name for attack in options.only)
    print(f"redteam: seed {options.seed}, {options.seconds:g} s, attacks {listed}, {machine}", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="redteam-") as directory:
        launcher = None if options.url else Launcher(Path(directory), options.weights.resolve())
        try:
            with launcher.running() if launcher else nullcontext(_remote(options)) as target:
                reports = run(target, launcher, options)
        except ServiceFailed as error:
            print(f"redteam: the service does not start: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("redteam: interrupted", file=sys.stderr)
            return 130
    print(table(reports))
    if options.json:
        result = {"seed": options.seed, "seconds": options.seconds, "machine": machine}
        result["reports"] = [{**asdict(report), "verdict": report.verdict} for report in reports]
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(report.findings for report in reports))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="redteam", description="Attacks a service from outside; exit status 1 if an attack succeeds."
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="time of all attacks together (default: 120)")
    parser.add_argument("--seed", type=int, help="repeats the messages of an earlier run (default: drawn and printed)")
    names = ", ".join(attack.name for attack in ATTACKS)
    parser.add_argument("--only", type=_attacks, default=ATTACKS, metavar="A,B", help=f"attacks to run: {names}")
    parser.add_argument("--tries", type=int, default=1_000_000, metavar="N", help="most tries of each attack")
    parser.add_argument("--weights", type=Path, default=REPOSITORY / "weights", help="what is served (weights)")
    parser.add_argument(
        "--url", type=_address, help="attack this service; attacks that need files or signals are skipped"
    )
    parser.add_argument("--key", action="append", default=[], help="a key of it; give two for attacks across tenants")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result there")
    options = parser.parse_args(arguments)
    if not options.seconds > 0 or options.tries < 1:
        parser.error("--seconds and --tries must be positive")
    if options.key and not options.url:
        parser.error("--key needs --url: a service that is started here gets keys of its own")
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(2**32)
    return options


def _attacks(names: str) -> list[Attack]:
    chosen = set(names.split(","))
    if unknown := chosen - {attack.name for attack in ATTACKS}:
        raise argparse.ArgumentTypeError(f"no attack {', '.join(sorted(unknown))}")
    return [attack for attack in ATTACKS if attack.name in chosen]


def _address(url: str) -> Address:
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise argparse.ArgumentTypeError(f"{url}: expected http://HOST:PORT")
    return Address(host=parts.hostname, port=parts.port or 80)


def _remote(options: argparse.Namespace) -> Target:
    """A service that the suite did not start. A single key is used for both tenants."""
    first, second = [*options.key, *options.key, None, None][:2]
    return Target(options.url, (first, second))


def run(target: Target, launcher: Launcher | None, options: argparse.Namespace) -> list[Report]:
    """Runs the attacks; one report for each, and one for the state of the service afterwards."""
    seed = options.seed
    canary = f"canary-{random.Random(seed).getrandbits(64):016x}"
    before = condition(target)
    reports = []
    whole = sum(attack.share for attack in options.only)
    for attack in options.only:
        report = Report(attack=attack.name)
        reports.append(report)
        if attack.needs_launcher and launcher is None:
            report.skipped = "needs files or signals"
            continue
        budget = Budget(options.seconds * attack.share / whole)
        setting = Setting(
            target=target, rng=random.Random(f"{seed}:{attack.name}"), budget=budget, report=report, canary=canary,
            launcher=launcher, most_tries=options.tries,
        )  # fmt: skip
        began = time.monotonic()
        try:
            attack.run(setting)
        except (OSError, ValueError, LookupError, TypeError, StopIteration) as error:
            problem = f"an unexpected response ended the attack: {type(error).__name__}: {error}"
            report.add("high", problem, f"--only {attack.name} --seed {seed}")
        _check_service(target, report, canary, seed)
        show(report, f" ({time.monotonic() - began:.0f} s)")
    reports.append(_afterwards(target, before))
    show(reports[-1])
    return reports


def _check_service(target: Target, report: Report, canary: str, seed: int) -> None:
    """The service must still respond, and its log must show neither internals nor secrets."""
    repro = f"--only {report.attack} --seed {seed}"
    if not target.is_alive():
        report.add("critical", "the service does not answer after the attack", repro)
    target.settle()
    secrets = [canary, *(key for key in target.keys if key)]
    for line in leaks_in(target.new_log(), secrets):
        report.add("medium", f"the log shows internals or a secret: {line[:200]}", repro)


def condition(target: Target) -> tuple[list[str], int, int]:
    """A greedy completion for each tenant, resident bytes, and descriptors."""
    texts = []
    for tenant in (0, 1):
        body = {"prompt": "It was", "max_tokens": 40, "temperature": 0, "stream": False}
        response = target.call("POST", "/complete", tenant=tenant, body=body)
        texts.append(response.json()["choices"][0]["text"] if response.status == 200 else f"status {response.status}")
    sizes = (resident_bytes(target.pid), descriptors(target.pid)) if target.process else (0, 0)
    return texts, *sizes


def _afterwards(target: Target, before: tuple[list[str], int, int]) -> Report:
    report = Report(attack="liveness", tries=2, limit="same texts, memory and descriptors")
    target.settle()
    try:
        texts, memory, files = condition(target)
    except (OSError, ValueError) as error:
        report.add("critical", f"no response after the attacks: {error}", "a plain POST /complete")
        return report
    report.worst = f"{(memory - before[1]) / 2**20:+.0f} MiB, {files - before[2]:+d} descriptors"
    if texts != before[0]:
        report.add("critical", f"other texts than before: {texts} instead of {before[0]}", "greedy POST /complete")
    if memory - before[1] > MEMORY_SLACK or files - before[2] > DESCRIPTOR_SLACK:
        report.add("medium", f"memory or descriptors did not come back: {report.worst}", "the whole run")
    return report


def show(report: Report, seconds: str = "") -> None:
    """Prints the findings of an attack, each with what reproduces it."""
    print(f"{report.verdict:8} {report.attack}{seconds}: {report.skipped or report.worst}")
    for finding in report.findings:
        print(f"  [{finding.severity}] {finding.summary}\n      repro: {finding.repro[:4000]}")
    if report.found > len(report.findings):
        groups = ", ".join(f"{group or 'all'} {count}" for group, count in report.counts.items())
        print(f"  {report.found} in all: {groups}")
    sys.stdout.flush()


def table(reports: list[Report]) -> str:
    """The summary in Markdown."""
    rows = ["| attack | tries | worst figure | limit | verdict |", "|---|---|---|---|---|"]
    rows += [f"| {r.attack} | {r.tries} | {r.skipped or r.worst} | {r.limit} | {r.verdict} |" for r in reports]
    return "\n".join(rows)


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        sys.exit(main())
