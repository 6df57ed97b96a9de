"""The next step for a namespace's credential, and what any order of steps of two replicas leads to."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from leasedjob.controller.credential import Next, SecretView, Step, decide, decoded, view
from leasedjob.lease.tenants import Slot, TenantState

A, B = Slot.A, Slot.B
DAY = timedelta(days=1)
NAMES = {"role_a": A, "role_b": B}
WHERE = {"host": "db", "port": "5432", "dbname": "leasedjob"}


def state(slot: Slot = A, *in_force: Slot, age: timedelta = timedelta(0), **more: Any) -> TenantState:
    values: dict[str, Any] = {"overlapping": False, "retirable": False, **more}
    return TenantState(slot, 0, age, in_force=frozenset(in_force), **values)


def secret(slot: Slot | None = A, next: Slot | None = None, where: bool = True) -> SecretView:
    return SecretView(slot, next, where)


@pytest.mark.parametrize(
    ("seen", "known", "expected"),
    [
        pytest.param(None, state(A), Next(Step.STAGE, A), id="nothing yet"),
        pytest.param(secret(None, A), state(A), Next(Step.PROMOTE, A), id="staged"),
        pytest.param(secret(A), state(A, A), Next(Step.NOTHING, A), id="as it should be"),
        pytest.param(None, state(A, A), Next(Step.STAGE, B), id="deleted: Pods go on with slot a"),
        pytest.param(secret(None), state(B, B), Next(Step.STAGE, A), id="overwritten with something else"),
        pytest.param(None, state(B, A, B, overlapping=True), Next(Step.STAGE, A), id="deleted during the overlap"),
        pytest.param(secret(A), state(B, B), Next(Step.STAGE, A), id="an old one from a backup"),
        pytest.param(secret(A), state(A, A, age=DAY), Next(Step.STAGE, B), id="old enough"),
        pytest.param(secret(A), state(A, A, age=DAY / 2), Next(Step.NOTHING, A), id="young enough"),
        pytest.param(secret(A, B), state(A, A, age=DAY), Next(Step.PROMOTE, B), id="staged, role not set"),
        pytest.param(secret(A, B), state(A, A, B, age=DAY), Next(Step.PROMOTE, B), id="staged, role set"),
        pytest.param(secret(B), state(A, A, B, age=DAY), Next(Step.SWITCH, B), id="promoted"),
        pytest.param(secret(B), state(B, A, B, overlapping=True), Next(Step.NOTHING, B), id="overlapping"),
        pytest.param(
            secret(B), state(B, A, B, overlapping=True, age=DAY), Next(Step.NOTHING, B), id="one after the other"
        ),
        pytest.param(
            secret(B), state(B, A, B, overlapping=True, retirable=True), Next(Step.RETIRE, A), id="its time is over"
        ),
        pytest.param(
            secret(A), state(B, A, B, overlapping=True, retirable=True), Next(Step.SWITCH, A), id="never what is in use"
        ),
        pytest.param(secret(A, where=False), state(A, A), Next(Step.READDRESS, A), id="the database has moved"),
        pytest.param(secret(None, where=False), state(A), Next(Step.STAGE, A), id="edited out of use"),
    ],
)
def test_the_next_step(seen: SecretView | None, known: TenantState, expected: Next) -> None:
    assert decide(seen, known, DAY) == expected


def test_without_rotation_nothing_grows_old_but_what_was_begun_is_ended() -> None:
    assert decide(secret(A), state(A, A, age=1000 * DAY), timedelta(0)).step is Step.NOTHING
    assert decide(secret(A, B), state(A, A), timedelta(0)).step is Step.PROMOTE
    assert decide(secret(B), state(B, A, B, overlapping=True, retirable=True), timedelta(0)).step is Step.RETIRE


def test_what_a_secret_holds() -> None:
    def seen(values: dict[str, str]) -> SecretView:
        return view({"data": {k: base64.b64encode(v.encode()).decode() for k, v in values.items()}}, NAMES, WHERE)

    good = {**WHERE, "user": "role_b", "password": "x"}
    assert seen(good) == SecretView(B, None, True)
    assert seen({**good, "password": ""}) == SecretView(None, None, True)
    assert seen({**good, "user": "postgres"}) == SecretView(None, None, True)
    assert seen({**good, "next-user": "role_a", "next-password": "y"}) == SecretView(B, A, True)
    assert seen({**good, "next-user": "postgres", "next-password": "y"}) == SecretView(B, None, True)
    assert seen({**good, "host": "elsewhere"}) == SecretView(B, None, False)
    assert seen({**good, "sslmode": "disable"}) == SecretView(B, None, False)
    assert seen({**good, "tls.crt": "a key of the user's own"}) == SecretView(B, None, True)
    assert decoded({"a": "/w==", "b": "%"}) == {"a": "", "b": ""}
    assert view({}, NAMES, WHERE) == SecretView(None, None, False)


# --- two replicas, in any order, dying anywhere ----------------------------------------------------------------------


@dataclass
class World:
    """The Secret with its version, and the database: roles' passwords, who speaks for the tenant, and the slots."""

    version: int = 0
    data: dict[str, str] | None = None
    passwords: dict[Slot, str] = field(default_factory=dict)
    known: TenantState = field(default_factory=lambda: state(A))
    made: int = 0

    def password(self) -> str:
        self.made += 1
        return f"password-{self.made}"

    def write(self, version: int, **changes: str | None) -> bool:
        """As the API server: refused if the Secret isn't what it was."""
        if version != self.version:
            return False
        data = {**(self.data or {}), **changes}
        self.data = {k: v for k, v in data.items() if v is not None}
        self.version += 1
        return True

    def transition(self, seen: TenantState, **changes: Any) -> bool:
        if seen.generation != self.known.generation:
            return False
        self.known = replace(self.known, generation=self.known.generation + 1, **changes)
        return True

    def works(self) -> bool:
        """Whoever reads the Secret now can log in, if it names a role at all."""
        if self.data is None or "user" not in self.data:
            return True
        slot = NAMES[self.data["user"]]
        return slot in self.known.in_force and self.passwords.get(slot) == self.data["password"]


class Replica:
    """One operator: it looks, and later takes one half of a step after the other; or dies in between."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.todo: list[Any] = []

    def go(self) -> None:
        if self.todo:
            if not self.todo.pop(0)():
                self.todo = []  # refused: look again
        else:
            self.todo = list(self.plan())

    def plan(self) -> Iterable[Any]:
        world = self.world
        version, data, known = world.version, dict(world.data) if world.data is not None else None, world.known
        seen = None
        if data is not None:
            seen = SecretView(NAMES.get(data.get("user", "")), NAMES.get(data.get("next-user", "")), True)
        step = decide(seen, known, DAY)
        role = next(n for n, s in NAMES.items() if s is step.slot)
        match step.step:
            case Step.STAGE:
                new = world.password()
                yield lambda: world.write(version, **{"next-user": role, "next-password": new})
            case Step.PROMOTE:
                assert data is not None
                password = data["next-password"]

                def ensure() -> bool:
                    if not world.transition(known, in_force=world.known.in_force | {step.slot}):
                        return False
                    world.passwords[step.slot] = password
                    return True

                yield ensure
                yield lambda: world.write(
                    version, user=role, password=password, **{"next-user": None, "next-password": None}
                )
            case Step.SWITCH:
                yield lambda: world.transition(
                    known,
                    slot=step.slot,
                    overlapping=True,
                    age=timedelta(0),
                )
            case Step.RETIRE:

                def retire() -> bool:
                    if world.known.retirable:
                        old = world.known.slot.other
                        world.passwords.pop(old, None)
                        world.known = replace(
                            world.known,
                            overlapping=False,
                            retirable=False,
                            in_force=world.known.in_force - {old},
                            generation=world.known.generation + 1,
                        )
                    return True

                yield retire
            case _:
                pass


@settings(max_examples=500)
@given(st.lists(st.sampled_from(["one", "two", "one", "two", "die one", "die two", "a day", "delete"]), max_size=60))
@example(["one", "one", "two", "delete", "one", "one", "one"])  # a late replica sets a password that nobody reads
def test_in_any_order_of_two_replicas_steps_the_secret_works_and_settles(events: list[str]) -> None:
    world = World()
    replicas = {"one": Replica(world), "two": Replica(world)}
    for event in events:
        if event in replicas:
            replicas[event].go()
        elif event.startswith("die"):
            replicas[event.removeprefix("die ")].todo = []
        elif event == "a day":
            world.known = replace(world.known, age=world.known.age + DAY, retirable=world.known.overlapping)
        else:
            world.data, world.version = None, world.version + 1
        assert world.works(), world
    for _ in range(30):
        for replica in replicas.values():
            replica.go()
            assert world.works(), world
    assert world.data is not None
    assert NAMES[world.data["user"]] is world.known.slot
    assert world.known.slot in world.known.in_force
    assert "next-user" not in world.data
    assert world.known.in_force == {world.known.slot} or world.known.overlapping
