"""Clients use a store over a network that delays, cuts, resets and falls silent.

Each piece of work meets a fault of the proxy on its first connection, and now and then on the later ones. What was
acknowledged must be stored, once and as it was. Work ends within its time, well or by an error of the store's, and who
waits for long is told.
"""

import logging
import random
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from blocktune.db.exchange.merging import Results
from blocktune.db.records.records import Best, Trial
from blocktune.db.store import ResultStore
from blocktune.kernels.values.errors import StoreError
from blocktune.kernels.values.shape import AttentionShape
from tests.support.stores.postgres_server import ADMIN, running_server
from tests.support.stores.sample_records import sample_trials, winner
from tools.stores.server.proxy import WELL, Ending, Fault, Moment, Proxy, running_proxy

CLIENTS = 8
PATIENCE_SECONDS = 6.0
MOST_SECONDS = 60.0
UNTOLD_SECONDS = 5.5
"""A word is said after 5 s."""
GOOD_SHARE = 0.7
"""Of a piece of work's connections after the first."""


@dataclass
class Client:
    """A client with a proxy and a shape of its own. Nobody else writes rows of the shape."""

    number: int
    store: ResultStore
    proxy: Proxy
    dice: random.Random
    stored: list[Trial] = field(default_factory=list)
    unsure: list[Trial] = field(default_factory=list)
    best: Best | None = None
    ended: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    def work(self, tried: int) -> None:
        """Do so many pieces of work, and note what goes wrong."""
        for number in range(tried):
            what = self.dice.choice((self.record, self.merge, self.set_best, self.read, self.open))
            said, began = len(self.words), time.monotonic()
            self._meet(fault_of(self.dice))
            self._judge(what, number)
            seconds = time.monotonic() - began
            if seconds > MOST_SECONDS or (seconds > UNTOLD_SECONDS and len(self.words) == said):
                self.wrong.append(f"{what.__name__} took {seconds:.0f} s and said {self.words[said:]}")

    def record(self, number: int) -> None:
        (trial,) = self._send(number)
        self.store.record(trial)
        self._acknowledge([trial])

    def merge(self, number: int) -> None:
        trials = self._send(*(number + 10_000 * part for part in (1, 2, 3)))
        counts = self.store.merge([Results(trials=tuple(trials))], trust=True)
        self._acknowledge(trials)
        if counts.trials != len(trials):
            self.wrong.append(f"a merge of {len(trials)} trials says that {counts.trials} were stored")

    def set_best(self, _: int) -> None:
        best = replace(winner(), shape=self.shape)
        if not self.store.set_best(best):
            self.wrong.append("the store says that it holds a better winner than the youngest")
        self.best = best

    def read(self, _: int) -> None:
        found = set(self.store.trials(shape=self.shape))
        if not set(self.stored) <= found <= {*self.stored, *self.unsure}:
            self.wrong.append("a reader got other trials than were stored")

    def open(self, _: int) -> None:
        ResultStore.open(self.store.target, lock_timeout_seconds=PATIENCE_SECONDS).close()

    @property
    def shape(self) -> AttentionShape:
        return replace(winner().shape, batch=self.number + 1)

    def lost(self, server: ResultStore) -> int:
        """Return how many acknowledged rows are not stored as they were, and note rows that should not be there."""
        found = Counter(server.trials(shape=self.shape))
        strange = sum(found.values()) - len(set(found) & {*self.stored, *self.unsure})
        if strange:
            self.wrong.append(f"{strange} trials were never sent or are stored twice")
        best = server.best(winner().device, self.shape)
        is_older = self.best is not None and (best is None or best.created_at < self.best.created_at)
        return len(set(self.stored) - set(found)) + is_older

    def _meet(self, first: Fault) -> None:
        """Have the next connection meet a fault, and the later ones now and then."""
        faults = [first]
        dice = random.Random(self.dice.random())  # another thread's: connections are asked for there
        self.proxy.plan = lambda: faults.pop() if faults else WELL if dice.random() < GOOD_SHARE else fault_of(dice)

    def _judge(self, what: Callable[[int], None], number: int) -> None:
        try:
            what(number)
            self.ended["well"] += 1
        except StoreError as error:
            self.ended[type(error).__name__] += 1
            if "secret" in str(error):
                self.wrong.append(f"{what.__name__} told the password")
        except Exception as error:
            self.wrong.append(f"{what.__name__} ended with {type(error).__name__}: {error!s:.200}")

    def _send(self, *numbers: int) -> list[Trial]:
        """Return trials that may be stored from now on."""
        (trial,) = sample_trials(1)
        configs = [replace(trial.config, extra=(("number", number),)) for number in numbers]
        trials = [replace(trial, shape=self.shape, config=config) for config in configs]
        self.unsure += trials
        return trials

    def _acknowledge(self, trials: list[Trial]) -> None:
        self.unsure = [trial for trial in self.unsure if trial not in trials]
        self.stored += trials


def fault_of(dice: random.Random) -> Fault:
    """Return a fault: delays, a line of few bytes a second, or an end at some moment."""
    kind = dice.random()
    if kind < 0.1:
        return Fault(delays_s=(0.05, 0.5))
    if kind < 0.2:
        return Fault(bytes_per_s=dice.choice((20_000.0, 100_000.0)))
    ending = dice.choices(tuple(Ending), weights=(4, 4, 1))[0]
    return Fault(ending, dice.choice(tuple(Moment)), delays_s=(0.0, 0.02), pieces=dice.randrange(12))


class Listener(logging.Handler):
    """Gives each client the warnings that name its proxy."""

    def __init__(self, clients: list[Client]) -> None:
        super().__init__(logging.WARNING)
        self._clients = clients

    def emit(self, record: logging.LogRecord) -> None:
        for client in self._clients:
            if f":{client.proxy.port}/" in record.getMessage():
                client.words.append(record.getMessage())


def network(folder: Path, tried: int, seed: int) -> tuple[int, int, str]:
    """Clients use a PostgreSQL store over a network that delays, cuts, resets and falls silent."""
    with ExitStack() as stack:
        server = stack.enter_context(running_server())
        place = server.create_database("network")
        direct = stack.enter_context(ResultStore.open(place))
        clients = []
        for number in range(CLIENTS):
            proxy = stack.enter_context(running_proxy(server.folder))
            store = ResultStore.open(proxy.url("network", ADMIN), lock_timeout_seconds=PATIENCE_SECONDS)
            clients.append(Client(number, store, proxy, random.Random(f"{seed} {number}")))
        listener, logger = Listener(clients), logging.getLogger("blocktune")
        logger.addHandler(listener)
        stack.callback(logger.removeHandler, listener)
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(lambda client: client.work(-(-tried // CLIENTS)), clients))
        lost = sum(client.lost(direct) for client in clients)
    ended = sum((client.ended for client in clients), Counter[str]())
    wrong = [each for client in clients for each in client.wrong]
    stored, cuts = sum(len(client.stored) for client in clients), sum(client.proxy.endings for client in clients)
    told = ", ".join(f"{count:,} {how}" for how, count in sorted(ended.items()))
    note = f"{stored:,} measurements were acknowledged, {cuts:,} connections ended early; ended: {told}"
    return lost, len(wrong), note + "".join(f"; {each}" for each in wrong[:5])
