"""Pins as the operator has them: made, shown, expired and removed, and in force at every replica that is there."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Final

import msgspec
import structlog

from engine.wire import CacheEvent, EngineInfo, Load, StepTiming
from gateway.config import PinConfig
from gateway.errors import ConfigError, ConflictError, HeadstartError, InvalidRequestError, PinNotFoundError
from gateway.logs import where_from
from gateway.pins.ceiling import Admission, Ceiling
from gateway.pins.prefix import Prefix, PrefixReader, read_keys
from gateway.pins.report import PinReport, PinRow
from gateway.pins.rows import pin_kind, pin_row, replica_summary
from gateway.pins.store import Pin, PinStore, Stamp, pin_id
from gateway.pins.upkeep import ReplicaPins, Target
from gateway.replicas.base import Replica, ReplicaState
from gateway.routing.router import Router

__all__ = ["MAX_PINS", "REMEMBER_REMOVED_S", "PinControl"]

MAX_PINS: Final = 1000

_TICK_S: Final = 1.0

REMEMBER_REMOVED_S: Final = 30 * 24 * 3600.0
"""A gateway that was away for longer brings back what was given up meanwhile."""

_log = structlog.get_logger("headstart.pins")


class PinControl:
    """A ``ReplicaObserver``. Owns the pins and what each replica is to do about them; belongs to the event loop.

    It observes replicas after the router, from which it takes what each of them holds.
    """

    def __init__(
        self,
        router: Router,
        reader: PrefixReader,
        *,
        configured: Collection[PinConfig],
        file: Path | None,
        secret: bytes,
        lasting_keys: bool,
        tenants: Collection[str],
        ceiling: Ceiling,
        quota: Callable[[str], int],
        templates_generation: Callable[[], int],
        writer: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Read the pins; nothing is done about them yet.

        ``secret`` is the deployment secret, and ``lasting_keys`` tells whether it was configured. ``tenants`` are all
        there are; ``templates_generation`` changes when other templates are registered. ``writer`` is the name of this
        life of the gateway among all that share their pins.

        Raises:
            ConfigError: a pin of the configuration cannot be, or the file cannot be used.
        """
        self._reader: Final = reader
        self._tenants: Final = sorted(tenants)
        self._ceiling: Final = ceiling
        self._quota: Final = quota
        self._templates_generation: Final = templates_generation
        self._writer: Final = writer
        self._clock: Final = clock
        self._news: dict[str, Pin | Stamp] = {}
        """What other gateways have changed, to be taken over with the next tick: pins, or when one was removed."""
        self.revision = 0
        """Another one whenever pins may have changed, or the keys by which they are kept."""
        self._prefixes: dict[str, Prefix | str] = {}
        """Of every pin its prefix, or why it has none."""
        self._generation = templates_generation()
        self._store: Final = PinStore(file, self._configured(configured, lasting_keys=lasting_keys), secret=secret)
        self._router: Final = router
        self._replicas: dict[str, ReplicaPins] = {}
        """Those that have been ready and were not stopped, by id."""
        self._admissions: dict[str, Admission] = {}
        self._changing: Final = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        for pin in self._store.all():
            self._read(pin)

    # --- life --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to keep pins in force, before the replicas start."""
        with contextlib.suppress(HeadstartError):  # tried again soon
            await self.expire()
        self._task = asyncio.create_task(self._keep_time(), name="pins")

    def close(self) -> None:
        """Begin nothing any more. Safe to repeat."""
        self._closed = True
        if self._task is not None:
            self._task.cancel()
        for upkeep in self._replicas.values():
            upkeep.close()

    async def stop(self) -> None:
        """Close, and wait for the end of what was begun."""
        self.close()
        for upkeep in self._replicas.values():
            await upkeep.stop()
        if self._task is not None:
            await asyncio.wait([self._task])
            self._task = None

    def dispatched(self, replica_id: str) -> None:
        """A user's request goes to this replica."""
        upkeep = self._replicas.get(replica_id)
        if upkeep is not None:
            upkeep.arrived()

    # --- what the operator does --------------------------------------------------------------------------

    async def create(self, wish: PinConfig, ttl_s: float | None = None) -> tuple[PinRow, bool]:
        """Pin something, or give the pin that it is already another end; the pin, and whether it is new.

        Raises:
            InvalidRequestError: it cannot be pinned; ``param`` names the place.
            ConflictError: it belongs to the configuration, or all pins together would be too much.
            HeadstartError: the file cannot be written; nothing has changed.
        """
        wish = self._settled(wish)
        prefix = self._reader.read(wish)
        now = self._clock()
        id = pin_id(wish)
        async with self._changing:
            pin = Pin(id, wish, now, None if ttl_s is None else now + ttl_s, stamp=self._stamp(id))
            known = self._store.get(id)
            if known is not None and known.configured:
                if ttl_s is not None:
                    raise ConflictError(f"{pin.id} belongs to the configuration file, and has no end.", param="ttl_s")
                return self._row(known), False
            if known is None:
                self._refuse_too_much(pin, prefix)
            else:
                pin = msgspec.structs.replace(pin, created=known.created)
            await self._store.put(pin)
            self._prefixes[pin.id] = prefix
            self.revision += 1
            await self._enforce()
        _log.info("pinned", pin=pin.id, kind=pin_kind(wish), template=wish.template, tenant=wish.tenant, ttl_s=ttl_s)
        return self._row(pin), known is None

    async def delete(self, id: str) -> None:
        """Give a pin up; its blocks stay until they are evicted.

        Raises:
            PinNotFoundError: there is none of this id.
            ConflictError: it belongs to the configuration.
            HeadstartError: the file cannot be written; nothing has changed.
        """
        async with self._changing:
            pin = self._store.get(id)
            if pin is None:
                raise PinNotFoundError(f"There is no pin {id[:64]!r}.")
            if pin.configured:
                raise ConflictError(f"{id} belongs to the configuration file, which alone can take it back.")
            await self._remove([pin], "unpinned", lasting=True)

    async def expire(self) -> None:
        """Give up the pins whose time is over, and read the others again when templates have changed.

        What other gateways have changed is taken over, and replicas that have left are forgotten.
        """
        async with self._changing:
            for id, upkeep in [*self._replicas.items()]:
                if upkeep.replica.state is ReplicaState.STOPPED:
                    await upkeep.stop()
                    del self._replicas[id]
                    self._admissions.pop(id, None)
            now = self._clock()
            await self._take_over()
            over = [pin for pin in self._store.all() if pin.expires is not None and pin.expires <= now]
            if over:
                await self._remove(over, "pin expired")
            await self._store.forget_removed(round((now - REMEMBER_REMOVED_S) * 1000))
            if self._generation != self._templates_generation():
                self._generation = self._templates_generation()
                for pin in self._store.all():
                    self._read(pin)
                await self._enforce()

    def report(self) -> PinReport:
        """Every pin and every replica that can keep some."""
        rows = [self._row(pin) for pin in self._store.all()]
        summaries = {
            id: replica_summary(upkeep, self._admissions.get(id), self._ceiling)
            for id, upkeep in self._replicas.items()
            if upkeep.pins_blocks
        }
        return PinReport(rows, summaries, self._ceiling.share, self._store.persistent)

    # --- what gateways share -----------------------------------------------------------------------------

    @property
    def store(self) -> PinStore:
        """The pins as they are kept; only to be read."""
        return self._store

    def chain_keys(self, pin: Pin) -> tuple[str, ...]:
        """The chain of block keys (hex) by which engines keep a pin; none while no engine has been ready."""
        prefix = self._prefixes.get(pin.id)
        infos = (upkeep.replica.info for upkeep in self._replicas.values() if upkeep.pins_blocks)
        info = next((info for info in infos if info is not None), None)
        if not isinstance(prefix, Prefix) or info is None:
            return ()
        return tuple(key.hex() for key in self._reader.chain(pin.wish, prefix, info).keys)

    def hear(self, news: Mapping[str, Pin | Stamp]) -> None:
        """Another gateway has made pins, or has given them up at the time of a stamp."""
        self._news.update(news)

    @property
    def problems(self) -> int:
        """Pins that are in force nowhere."""
        return sum(isinstance(prefix, str) for prefix in self._prefixes.values())

    # --- ReplicaObserver ---------------------------------------------------------------------------------

    def on_ready(self, replica: Replica, info: EngineInfo) -> None:
        """An engine (re)started: it is told of the pins, and they are prefilled."""
        if self._task is None or self._closed:
            return
        known = self._replicas.get(replica.id)
        if known is None or known.replica is not replica:
            if known is not None:
                known.close()
            self._replicas[replica.id] = self._upkeep(replica)
            self._replicas[replica.id].start()
        self.revision += 1
        self._aim(replica.id, restarted=True)

    def on_down(self, replica: Replica, reason: str) -> None:
        """It will be told again when it comes back."""

    def on_events(self, replica: Replica, events: tuple[CacheEvent, ...]) -> None:
        """The router keeps what is held."""

    def on_step(self, replica: Replica, timing: StepTiming, load: Load) -> None:
        """Nothing to do."""

    # --- inside ------------------------------------------------------------------------------------------

    def _upkeep(self, replica: Replica) -> ReplicaPins:
        router = self._router
        return ReplicaPins(
            replica, held=lambda: router.index.holds(replica.id), in_flight=lambda: router.in_flight(replica.id)
        )

    async def _keep_time(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                await self.expire()
            except HeadstartError:  # a file that cannot be written now is tried again
                continue
            except Exception as error:  # whatever it was, the next tick must not suffer
                _log.error("pins could not be looked after", error=where_from(error))

    def _configured(self, wishes: Collection[PinConfig], *, lasting_keys: bool) -> list[Pin]:
        now = self._clock()
        pins = []
        for index, wish in enumerate(wishes):
            try:
                if wish.keys and not lasting_keys:
                    raise InvalidRequestError("keys need a secret: without one they change with every start.")
                settled = self._settled(wish)
                self._reader.read(settled)
            except InvalidRequestError as error:
                raise ConfigError(f"pins[{index}]: {error.message}") from None
            pins.append(Pin(pin_id(settled), settled, now, configured=True))
        return pins

    def _settled(self, wish: PinConfig) -> PinConfig:
        """``wish`` with its tenant. Raises ``InvalidRequestError`` where what it says does not go together."""
        if bool(wish.keys) == (wish.template is not None):
            raise InvalidRequestError(
                "Give either a template, with or without documents, or keys.", param="template" if wish.keys else None
            )
        if wish.keys:
            for field in ("documents", "tools", "tenant", "cache_salt"):
                if getattr(wish, field):
                    raise InvalidRequestError(f"{field} goes with a template: keys say it already.", param=field)
            return wish
        if wish.tenant is None and len(self._tenants) == 1:
            return msgspec.structs.replace(wish, tenant=self._tenants[0])
        if wish.tenant not in self._tenants:
            found = "tenant is missing" if wish.tenant is None else f"there is no tenant {wish.tenant!r}"
            raise InvalidRequestError(f"{found}: there are {', '.join(self._tenants)[:512]}.", param="tenant")
        return wish

    def _stamp(self, id: str) -> Stamp:
        """Of a change that is made now."""
        return Stamp(max(round(self._clock() * 1000), self._store.stamp(id).version + 1), self._writer)

    async def _take_over(self) -> None:
        """Have what other gateways have changed, where nothing newer is known here."""
        news, self._news = self._news, {}
        try:
            pins, removed = [], {}
            for id, change in news.items():
                stamp, known = self._store.stamp(id), self._store.get(id)
                if isinstance(change, Stamp):
                    if change > stamp:
                        removed[id] = change
                elif change.stamp > stamp or (change.stamp == stamp and known is not None and known.borrowed):
                    if known is not None and change.borrowed and not known.borrowed:  # its texts are here
                        change = msgspec.structs.replace(change, wish=known.wish, borrowed=False, keys=())
                    if change != known:
                        pins.append(change)
            if removed:
                await self._store.remove([], removed)
            if pins:
                await self._store.put(*pins)
        except BaseException:
            self._news = news | self._news
            raise
        if pins or removed:
            _log.info("pins of other gateways taken over", pins=len(pins), removed=len(removed))
            for pin in self._store.all():
                self._read(pin)
            self._prefixes = {pin.id: self._prefixes[pin.id] for pin in self._store.all()}
            await self._enforce()

    def _read(self, pin: Pin) -> None:
        """Find the prefix of a pin, or say why it has none any more."""
        self.revision += 1
        try:
            self._prefixes[pin.id] = self._borrowed(pin) if pin.borrowed else self._reader.read(self._settled(pin.wish))
        except HeadstartError as error:
            if self._prefixes.get(pin.id) != error.message:
                _log.warning("a pin is not in force", pin=pin.id, reason=error.message)
            self._prefixes[pin.id] = error.message

    def _borrowed(self, pin: Pin) -> Prefix:
        if not pin.keys:
            raise HeadstartError("Its keys are not known here: it was made under another deployment secret.")
        return Prefix(keys=read_keys(pin.keys))

    def _refuse_too_much(self, pin: Pin, prefix: Prefix) -> None:
        """Raise ``ConflictError`` or ``InvalidRequestError`` where a new pin does not fit a replica with all others."""
        pins = self._store.all()
        if len(pins) >= MAX_PINS:
            raise ConflictError(f"There are {MAX_PINS} pins; delete some of them first.")
        for id, upkeep in self._replicas.items():
            if (info := upkeep.replica.info) is None:
                continue
            reason = self._admit([*pins, pin], {**self._prefixes, pin.id: prefix}, info).refused.get(pin.id)
            if reason is not None:
                raise ConflictError(f"It does not fit {id}: {reason}.")

    def _admit(self, pins: Collection[Pin], prefixes: Mapping[str, Prefix | str], info: EngineInfo) -> Admission:
        chains = [
            (pin.id, pin.wish.tenant, self._reader.chain(pin.wish, prefix, info))
            for pin in pins
            if isinstance(prefix := prefixes[pin.id], Prefix)
        ]
        return self._ceiling.admit(chains, info)

    def _aim(self, replica_id: str, *, restarted: bool = False) -> None:
        """Tell a replica's upkeep which pins fit there."""
        upkeep = self._replicas[replica_id]
        if (info := upkeep.replica.info) is None:
            return
        pins = self._store.all()
        before = self._admissions.get(replica_id)
        admission = self._admissions[replica_id] = self._admit(pins, self._prefixes, info)
        for id, reason in admission.refused.items():
            if before is None or before.refused.get(id) != reason:
                _log.warning("a pin does not fit", pin=id, replica=replica_id, reason=reason)
        targets = {}
        for pin in pins:
            if (chain := admission.chains.get(pin.id)) is not None:
                tenant = pin.wish.tenant or ""
                targets[pin.id] = Target(chain, tenant, self._quota(tenant))
        upkeep.want(targets, restarted=restarted)

    async def _enforce(self) -> None:
        """Have the pins as they are now at every replica; engines know of them when this returns."""
        for id in self._replicas:
            self._aim(id)
        await asyncio.gather(*[upkeep.apply() for upkeep in self._replicas.values()])

    async def _remove(self, pins: Collection[Pin], event: str, *, lasting: bool = False) -> None:
        """``lasting``: no other gateway shall bring them back. Those whose time is over end everywhere anyway."""
        removed = {pin.id: self._stamp(pin.id) for pin in pins} if lasting else {}
        await self._store.remove([pin.id for pin in pins], removed)
        self.revision += 1
        for pin in pins:
            self._prefixes.pop(pin.id, None)
            _log.info(event, pin=pin.id, template=pin.wish.template, tenant=pin.wish.tenant)
        await self._enforce()

    def _row(self, pin: Pin) -> PinRow:
        return pin_row(pin, self._prefixes[pin.id], self._replicas, self._admissions)
