"""The gateway: between environments and engines.

Owns which engine serves which request, and that a request is answered exactly once, ends with an error that says why,
or is cancelled. Never samples, trains or starts a process. Promises that the death of an engine costs a trajectory only
time: it goes on elsewhere from its tokens; that a class of hardware that fails is replaced visibly; and that nobody
waits for an engine that will never come.

A request goes to the class that its task prefers. There it goes to the engine that served its session last and still
has its prefix, unless that one has much more to do than another (OVERLOAD); else to the one with the fewest tokens
outstanding.

Engines start, take weights and die each by itself: see engine_supervisor.py. An engine that hangs has to notice it
itself while it serves; while it starts or takes weights, its keeper does. Weights that no engine takes are nobody's:
all go on with those that they have. Where some take them and others do not, the others are ended and start with them:
nobody would notice that two versions write.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import NamedTuple

from tangram.errors import InvalidConfig, InvalidInput, ManagerError
from tangram.rl.inference.affinity import ANY, Binding, bind, compatible, first_choice, resolved, wanted
from tangram.rl.inference.engine_supervisor import Keeper, Limits, Order
from tangram.rl.inference.engines.openai import NoPlace, Unreachable
from tangram.rl.inference.engines.protocol import (
    Engine,
    EngineDied,
    EngineStatistics,
    Generation,
    Request,
    RequestRefused,
    Weights,
)
from tangram.rl.inference.resumed_generation import complete, joined, rest_of, sound
from tangram.rl.inference.router_records import (
    CameBack,
    Event,
    FellBack,
    GatewayStatistics,
    NoEngine,
    RequestDropped,
    RequestGivenUp,
    RequestResumed,
)

OVERLOAD, READ_AGAIN = 2.0, 4.0
"""A session leaves the engine that has its prefix if that one has more than OVERLOAD times the load of the least loaded
one and READ_AGAIN times the prefix on top. At twice the load each step takes up to twice the time. But tokens that are
outstanding are mostly written side by side, while a prefix that is read again holds up all others of its engine, so
each of its tokens counts several times. Below that, moving costs more than it gains."""
SESSIONS_MAX = 65_536
"""Far more than trajectories are open at once. Whoever is forgotten has its prefix read again."""
SUSPECT_DEATHS, GIVE_UP_DEATHS = 2, 3
"""Of engines with a request inside. After two it is a suspect, and no two suspects are served at once, so that the
third death tells the one that kills from those that happened to be there; that one is given up, and its deaths do not
count against the engines, unless these serve nobody else either (GIVEN_UP_MAX of engine_supervisor.py)."""


class _Home(NamedTuple):
    """Where a session was served last."""

    keeper: Keeper
    epoch: tuple[int, int]
    tokens: int
    """That are there of it."""


class _Death(NamedTuple):
    """What became of a request whose engine died."""

    error: EngineDied
    inside: bool
    """Whether it may have been what killed it: the engine lived when it came."""


class Gateway:
    def __init__(
        self,
        engines: Sequence[Engine],
        *,
        affinity: Mapping[str, str] | None = None,
        deaths_max: int = 3,
        deaths_window_s: float = 300.0,
        start_s_max: float = 300.0,
        update_s_max: float = 120.0,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        names = [engine.name for engine in engines]
        if not engines or len(set(names)) != len(names):
            raise InvalidConfig("engines", names, "at least one engine, each with a name of its own")
        if deaths_max < 1:
            raise InvalidConfig("deaths_max", deaths_max, "at least 1")
        limits = Limits(
            deaths_max=deaths_max, window_s=deaths_window_s, start_s_max=start_s_max, update_s_max=update_s_max
        )
        classes = list(dict.fromkeys(engine.hardware for engine in engines))
        self._affinity = {
            task: hardware and resolved(hardware, classes, key=f"affinity.{task}")
            for task, hardware in (affinity or {}).items()
        }
        self._keepers = [Keeper(engine, limits, self._tell, self._wake_all) for engine in engines]
        self._on_event = on_event
        self._order: Order | None = None
        self._orders = 0
        """How many there have been."""
        self._closing = False
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._inside: set[str] = set()
        self._homes: OrderedDict[str, _Home] = OrderedDict()
        self._suspects = asyncio.Lock()
        self._seen: dict[str, None] = {}
        """Tasks, in the order in which they came."""
        self._fallen: dict[str, str] = {}
        """By task that falls back: to which class."""
        self._fallbacks: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()

    # ---- its life ----

    async def start(self, weights: Weights) -> None:
        """Until each engine serves or was given up. Raises NoEngine, if none serves."""
        assert self._order is None, "a gateway is started once"
        self._command(weights)
        self._tasks = [asyncio.create_task(keeper.run(), name=f"keep {keeper.name}") for keeper in self._keepers]
        try:
            while not all(keeper.serves or keeper.gone for keeper in self._keepers):
                await self._changed.wait()
            if all(keeper.gone for keeper in self._keepers):
                raise self._no_engine(self._keepers, "no engine started")
        except BaseException:
            await self.close()
            raise

    async def update(self, weights: Weights, *, rollback: bool = False) -> None:
        """Until each engine that serves has answered; if none serves, each that may again. Those that start later get
        the newest. Raises NoEngine; ManagerError if no engine took these weights, in which case all go on with those
        before; and InvalidConfig for a version older than the present one without `rollback`."""
        self._require_open()
        assert self._order is not None
        present = self._order.weights.version
        if weights.version < present and not rollback:
            raise InvalidConfig(
                "version", weights.version, f"at least {present}, the present one; an older one takes rollback=True"
            )
        number = self._command(weights)
        while any(max(keeper.applied, keeper.refused) < number for keeper in self._asked()):
            await self._changed.wait()
            self._require_open()
        if all(keeper.gone for keeper in self._keepers):
            raise self._no_engine(self._keepers, "no engine is left to take the weights")
        if all(keeper.applied < number for keeper in self._keepers):
            reasons = "; ".join(f"{each.name}: {each.refusal}" for each in self._keepers if each.refused >= number)
            raise ManagerError(
                f"no engine took version {weights.version}, so they go on with version {self._order.weights.version}: "
                f"{reasons}"
            )

    async def close(self) -> None:
        """Whoever is inside gets NoEngine. Also while it starts; also twice."""
        self._closing = True
        self._wake_all()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for keeper in self._keepers:
            keeper.closed()
        await asyncio.gather(*(keeper.end() for keeper in self._keepers))

    # ---- requests ----

    async def generate(self, request: Request) -> Generation:
        """Raises InvalidInput, NoEngine, RequestGivenUp and RequestRefused. Cancelled, it aborts the request in its
        engine."""
        self._require_open()
        if request.id in self._inside:
            raise InvalidInput("id", request.id, "a request that is not being served already")
        self._seen.setdefault(request.task)
        self._inside.add(request.id)
        try:
            generation = await self._insisted(request)
        except asyncio.CancelledError:
            self._counts["cancelled"] += 1
            raise
        except BaseException as error:
            self._counts["failed"] += 1
            if isinstance(error, RequestGivenUp | RequestRefused):
                now_s = asyncio.get_running_loop().time()
                self._tell(RequestDropped(at_s=now_s, request=request.id, reason=str(error)))
            raise
        finally:
            self._inside.discard(request.id)
        self._counts["served"] += 1
        return generation

    async def _insisted(self, request: Request) -> Generation:
        """Served, by one engine after the other if they die."""
        loop = asyncio.get_running_loop()
        pieces: list[Generation] = []
        visits: list[tuple[Keeper, int]] = []
        """Engines and their lives that died with it inside."""
        waited_s = 0.0
        while True:
            began_s = loop.time()
            rest = rest_of(request, pieces)
            async with self._alone(suspected=len(visits) >= SUSPECT_DEATHS):
                keeper = await self._place(rest)
                life = keeper.life
                waited_s += loop.time() - began_s
                try:
                    found = await self._served(keeper, rest)
                except RequestRefused as refusal:
                    keeper.turned_away(life, str(refusal))
                    raise
                if isinstance(found, Generation):
                    return joined([*pieces, found], waited_s)
                self._blame(request, keeper, life, visits, found)
                if found.error.written is not None:
                    pieces.append(sound(found.error.written, rest))
            if complete(request, pieces):
                return joined(pieces, waited_s)
            self._counts["resumed"] += 1
            self._tell(
                RequestResumed(
                    at_s=loop.time(),
                    request=request.id,
                    session=request.session,
                    task=request.task,
                    engine=keeper.name,
                    written=sum(len(piece.tokens) for piece in pieces),
                )
            )

    @contextlib.asynccontextmanager
    async def _alone(self, *, suspected: bool) -> AsyncIterator[None]:
        if not suspected:
            yield
            return
        async with self._suspects:
            yield

    async def _served(self, keeper: Keeper, request: Request) -> Generation | _Death:
        home, epoch = self._homes.get(request.session), keeper.epoch
        resident = home.tokens if home is not None and home.keeper is keeper and home.epoch == epoch else 0
        load = max(0, len(request.tokens) - resident) + request.sampling.tokens_max
        keeper.load += load
        keeper.requests += 1
        taken_in = asyncio.Event()
        door = asyncio.get_running_loop().call_soon(taken_in.set)  # later than an engine that is dead says so
        try:
            generation = await keeper.engine.generate(request)
        except EngineDied as died:
            return _Death(died, taken_in.is_set() and not isinstance(died, Unreachable))
        finally:
            door.cancel()
            keeper.load -= load
            keeper.requests -= 1
        keeper.answered()
        if request.session:
            tokens = len(request.tokens) + len(generation.tokens)
            self._homes[request.session] = _Home(keeper, epoch, tokens)
            self._homes.move_to_end(request.session)
            if len(self._homes) > SESSIONS_MAX:
                self._homes.popitem(last=False)
        return generation

    def _blame(
        self, request: Request, keeper: Keeper, life: int, visits: list[tuple[Keeper, int]], death: _Death
    ) -> None:
        """Raises RequestGivenUp, and NoEngine if the gateway was closed."""
        last = str(death.error)
        keeper.lost(life, last, blameless=isinstance(death.error, NoPlace))
        self._require_open()
        if keeper.closed_life >= life or not death.inside:
            return  # we ended it ourselves, it had no place, or it was dead before the request came
        visits.append((keeper, life))
        if len(visits) < GIVE_UP_DEATHS:
            return
        for visited in dict.fromkeys(visited for visited, _ in visits):
            visited.forgive([its_life for other, its_life in visits if other is visited])
        names = tuple(visited.name for visited, _ in visits)
        raise RequestGivenUp(request.id, len(visits), names, last)

    # ---- routing ----

    async def _place(self, request: Request) -> Keeper:
        """Waits while nobody serves who will again."""
        while True:
            self._require_open()
            preferred = wanted(self._affinity, request.task)
            own = first_choice(self._keepers, preferred)
            others = compatible(self._keepers, preferred) if preferred != ANY else []
            serving = [keeper for keeper in own if keeper.serves]
            if serving:
                self._note_class(request.task, preferred)
                return self._least(request, serving)
            serving = [keeper for keeper in others if keeper.serves]
            if serving:
                chosen = self._least(request, serving)
                self._note_fallback(request.task, preferred, chosen.hardware)
                return chosen
            if all(keeper.gone for keeper in (*own, *others)):
                raise self._no_engine([*own, *others], f"no engine is left for task {request.task}")
            self._counts["waiting"] += 1
            try:
                await self._changed.wait()
            finally:
                self._counts["waiting"] -= 1

    def _least(self, request: Request, serving: list[Keeper]) -> Keeper:
        least = min(serving, key=lambda keeper: keeper.load)
        home = self._homes.get(request.session) if request.session else None
        if home is None or home.keeper not in serving or home.keeper.epoch != home.epoch:
            return least
        if home.keeper.load > OVERLOAD * least.load + READ_AGAIN * home.tokens:
            self._counts["moved"] += 1
            return least
        self._counts["stayed"] += 1
        return home.keeper

    def _note_class(self, task: str, hardware: str) -> None:
        if self._fallen.pop(task, None) is not None:
            self._tell(CameBack(at_s=asyncio.get_running_loop().time(), task=task, hardware=hardware))

    def _note_fallback(self, task: str, preferred: str, used: str) -> None:
        self._fallbacks[task] += 1
        if self._fallen.get(task) != used:
            self._fallen[task] = used
            self._tell(FellBack(at_s=asyncio.get_running_loop().time(), task=task, wanted=preferred, used=used))

    # ---- looking at it ----

    def binding(self) -> Binding:
        """Which task goes where at the moment."""
        left = [keeper for keeper in self._keepers if not keeper.gone]
        healthy = {keeper.name for keeper in left if keeper.serves}
        return bind(self._affinity, self._seen, left, healthy=healthy)

    def statistics(self) -> GatewayStatistics:
        counts = self._counts
        return GatewayStatistics(
            version=self._order.weights.version if self._order is not None else 0,
            engines=tuple(keeper.kept() for keeper in self._keepers),
            requests=len(self._inside),
            waiting=counts["waiting"],
            served=counts["served"],
            cancelled=counts["cancelled"],
            failed=counts["failed"],
            resumed=counts["resumed"],
            stayed=counts["stayed"],
            moved=counts["moved"],
            fallbacks=dict(self._fallbacks),
            falling_back=tuple(self._fallen),
        )

    def engine_statistics(self) -> tuple[EngineStatistics, ...]:
        """Of those that serve."""
        return tuple(keeper.engine.statistics() for keeper in self._keepers if keeper.serves)

    # ---- inside ----

    def _command(self, weights: Weights) -> int:
        self._orders += 1
        self._want(Order(self._orders, weights))
        return self._orders

    def _want(self, order: Order) -> None:
        self._order = order
        for keeper in self._keepers:
            keeper.want(order)

    def _asked(self) -> list[Keeper]:
        """Whose answer to an order counts: those that serve; if none does, those that may again."""
        serving = [keeper for keeper in self._keepers if keeper.serves]
        return serving or [keeper for keeper in self._keepers if not keeper.gone]

    def _judge(self) -> None:
        """Whoever refused the newest order while others took it starts anew with it. If all refused it, the newest that
        any engine took holds again."""
        held = [keeper.has for keeper in self._keepers if keeper.has is not None]
        taken = max(held, key=lambda order: order.number, default=None)
        if taken is None or self._order is None or self._closing:
            return
        number = self._order.number
        if taken.number == number:
            for keeper in self._keepers:
                if keeper.refused == number != keeper.applied:
                    keeper.replace()
        elif all(keeper.refused == number for keeper in self._asked()):
            self._want(taken)

    def _wake_all(self) -> None:
        self._judge()
        self._changed.set()
        self._changed = asyncio.Event()

    def _require_open(self) -> None:
        if self._closing:
            raise NoEngine("the gateway was closed", retry=False)
        assert self._order is not None, "a gateway is started before it is used"

    def _no_engine(self, keepers: Sequence[Keeper], what: str) -> NoEngine:
        reasons = "; ".join(f"{keeper.name} ({keeper.hardware}): {keeper.reason}" for keeper in keepers)
        left = [keeper.name for keeper in self._keepers if not keeper.gone and keeper not in keepers]
        others = f"; {', '.join(left)} cannot train, so they do not take over" if left else ""
        return NoEngine(f"{what}: {reasons or 'there is none'}{others}", retry=False)

    def _tell(self, event: Event) -> None:
        """A listener that fails is told to the loop: no request has anything to do with that."""
        if self._on_event is None:
            return
        try:
            self._on_event(event)
        except Exception as error:
            context = {"message": "the listener of a gateway failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)
