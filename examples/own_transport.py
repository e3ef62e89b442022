"""A server and N clients, each a process with its own data and its own file, over loopback sockets and no framework.

Any of them may be killed at any moment and started again: what must survive is in DIR, and the run goes on to the bit.
"""

import argparse
import multiprocessing
import socket
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch

from fednorm import FednormError, Reception, RunConfig, Site, wire
from fednorm.core.state import digest
from fednorm.halves.terms import refuse_needs
from fednorm.running.config import updated
from fednorm.running.plan import build_model, make_plan
from fednorm.running.run import Run
from fednorm.running.store import Store


def settle(args):
    """The plan, of whose data a client takes its own rows and the server none, and the model that all start from."""
    torch.set_num_threads(1)  # more would add up in another order
    fields = {"method": args.method, "rounds": args.rounds, "eval.every": args.rounds, "data.clients": args.clients}
    fields |= {"clients_per_round": args.per_round, "data.train_limit": 40 * args.clients, "train.local_steps": 2}
    fields |= {"train.batch_size": 8, "engine.name": "sequential", "engine.device": "cpu", "model": "fedbs_mnist_cnn"}
    plan = make_plan(updated(RunConfig(), fields))
    return plan, build_model(plan.config, plan.federation)


def serve(args, folder):
    (plan, model), options = settle(args), {"per_round": args.per_round, "score_every": args.rounds}
    desk = Reception(folder / "server", args.clients, model, args.method, plan.work, run="example", **options)
    listener = socket.create_server(("127.0.0.1", 0))
    wire.save(folder / "port", {"port": listener.getsockname()[1]}, {})
    while not desk.over:
        try:
            with listener.accept()[0] as sock:
                for answer in desk.handle(wire.decode(wire.receive(sock) or b"")):
                    wire.send(sock, answer)
        except (FednormError, OSError) as error:  # whoever that was, it changed nothing
            print(f"refused: {error}", file=sys.stderr)
    stages, error = [row["stage"] for row in desk.rows], str(desk.failure or "")
    wire.save(folder / "result", {"server": digest(desk.server.tree), "stages": stages, "error": error}, {})


def take_part(args, folder, number):
    (plan, model), site, kept = settle(args), None, folder / f"client-{number:03}"
    data, rows = plan.federation, plan.federation.clients[number]
    mine, hello = wire.load_mine(kept), Site.hello(kept.name, model, len(rows))
    while not (folder / "result").exists():
        with suppress(FednormError, OSError):  # the server may be away; it will be back
            welcome, request = ask(folder, hello, answers=2)
            if not isinstance(request, wire.Refusal):
                own = {"train": (data.x[rows], data.y[rows]), "mean": data.mean, "std": data.std}
                site = site or Site(welcome.terms, welcome.client, model, task=plan.task, **own)
                answer, mine = site.answer(request, mine)
                wire.save_mine(kept, mine)
                ask(folder, answer, answers=0)
        time.sleep(0.005)


def ask(folder, message, answers):
    with socket.create_connection(("127.0.0.1", wire.load(folder / "port")[0]["port"])) as sock:
        wire.send(sock, message)
        return [wire.decode(wire.receive(sock) or b"") for _ in range(answers)]


def in_simulator(args):
    run = Run(settle(args)[0], Store())
    stages = [row["stage"] for row in run.rounds()]
    kept = [digest(state.tree) for state in run.store.get_many(range(args.clients)).values()]
    return {"server": digest(run.server.tree), "stages": stages, "error": "", "clients": kept}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--method", default="fedbn")
    for name, default in (("--clients", 4), ("--per-round", 2), ("--rounds", 6)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--check", action="store_true", help="play the same in the simulator; exit 1 where it differs")
    args, folder = parser.parse_args(), Path(tempfile.mkdtemp())
    try:
        refuse_needs(settle(args)[0].method)
    except FednormError as error:
        parser.error(str(error))
    with ProcessPoolExecutor(args.clients + 1, multiprocessing.get_context("fork")) as pool:
        pool.submit(serve, args, folder)
        list(pool.map(take_part, [args] * args.clients, [folder] * args.clients, range(args.clients)))
    kept = [digest(wire.load_mine(path).accepted.tree) for path in sorted(folder.glob("client-*"))]
    found = {**wire.load(folder / "result")[0], "clients": kept}
    print(found)
    sys.exit(args.check and found != in_simulator(args))
