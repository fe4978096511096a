"""One turn of a run: the model is asked, and what its reply asks for is done.

Both doors make their turns here. The turn writes nothing: it returns the state and the items that
are to be stored together, or an error with what is to be stored all the same. Its way:

1. guardrails of the input, before the first model call or beside it; no tool runs before them;
2. the model's reply, or the calls of an earlier reply that people have decided about;
3. approvals: calls that wait end the turn as `interrupted`, once all other calls were made;
4. tool calls, all at the same time;
5. a handoff, or the final output and its guardrails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as changed
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec.structs import replace

from capsule_tasks.errors import (
    CallChanged,
    MaxTurnsExceeded,
    ModelMisbehaved,
    RunStopped,
    ToolTimeout,
    WrongArguments,
)
from capsule_tasks.runs.agents.agent import Agent, ToolResult
from capsule_tasks.runs.agents.guardrails import InputGuardrail
from capsule_tasks.runs.agents.handoffs import HandoffInput
from capsule_tasks.runs.agents.tools import AgentTool
from capsule_tasks.runs.approvals import PendingCall
from capsule_tasks.runs.conversation import Conversation
from capsule_tasks.runs.engine.asking import asked
from capsule_tasks.runs.engine.deciding import (
    Plan,
    earlier_results,
    final_result,
    output_item,
    planned,
    with_tools_used,
    without_final_message,
)
from capsule_tasks.runs.engine.ends import Step, TurnDone, TurnFailed, kind_of
from capsule_tasks.runs.engine.guardrails import Guardrails, shown
from capsule_tasks.runs.engine.nested import run_inner
from capsule_tasks.runs.engine.ports import UNCERTAIN, Output, TurnPorts, key_of
from capsule_tasks.runs.engine.setup import (
    Abilities,
    RunSetup,
    called_back,
    listed,
    told_of_handoff,
)
from capsule_tasks.runs.engine.tools import ToolCaller, withheld
from capsule_tasks.runs.engine.waiting import side_by_side
from capsule_tasks.runs.identity import AgentId
from capsule_tasks.runs.items import without_orphans
from capsule_tasks.runs.models.model import ModelReply
from capsule_tasks.runs.records import CodeSession, GuardrailResult, Item
from capsule_tasks.runs.state import RunState

_OUTPUT = "function_call_output"


@dataclass
class Turn:
    """One turn. After a cancel, or an error but TurnFailed, `cut` has what is to be stored."""

    run: RunSetup
    state: RunState
    conversation: Conversation
    ports: TurnPorts
    _made: list[Item] = field(default_factory=list)
    """The items of the turn so far: those of the reply, and outputs."""
    _reply: ModelReply | None = None
    _calls: Sequence[PendingCall] = ()
    """The calls of the turn that are made, or wait."""
    _started: set[str] = field(default_factory=set)
    _nested: dict[str, RunState] = field(default_factory=dict)
    """The inner runs that are not over, by the ids of their calls."""

    async def make(self) -> TurnDone:
        """Make the turn, once. Raises TurnFailed; errors of the ports and cancels pass through."""
        try:
            return await self._made_whole()
        except (RunStopped, CallChanged, ToolTimeout) as error:
            items, state = self.cut()
            raise TurnFailed(kind_of(error), error, items, state) from error

    def cut(self) -> tuple[list[Item], RunState]:
        """The items that a turn has to store once it was cut, and the state that counts them."""
        nested = dict(self._nested)
        made = self._made
        if self._reply is not None:  # else the calls are those of an earlier reply, and stay
            for call_id, inner in self._nested.items():
                if not _has_outputs(inner):
                    self.state = self.state.with_usage(self.state.agent, inner.total_usage())
                    del nested[call_id]
            made = without_orphans(made, pending=nested)
        conversation, items = self._with_items(made)
        answered = [each["call_id"] for each in made if each.get("type") == _OUTPUT]
        state = self.state.with_calls(call for call in self._calls if call.call_id in nested)
        state = replace(state, nested=state.nested | nested).without_calls(answered)
        state = conversation.in_state(state)
        if state.turn == 0:
            # The guardrails of the input run again, should the run go on from here.
            state = replace(state, input=self.state.input)
        return items, state

    async def _made_whole(self) -> TurnDone:
        run, state = self.run, self.state
        run.context.turn = state.turn
        run.context.usage = state.total_usage()
        able = await run.book.abilities(state.agent, run.context)
        if state.calls:
            return await self._acted(able, state.calls, known=True)
        if run.max_turns is not None and state.turn >= run.max_turns:
            raise MaxTurnsExceeded(able.agent.name, run.max_turns)
        plan = await self._replied(able)
        self._made += plan.items
        if plan.is_final:
            return await self._finished(able, plan.text, plan.items)
        self._show(able.agent, plan.items)
        return await self._acted(able, plan.all_calls, told=plan.told)

    # --- the reply -------------------------------------------------------------------------------

    async def _replied(self, able: Abilities) -> Plan:
        """The plan of the model's reply, which all guardrails of the input have let pass."""
        run, state = self.run, self.state
        reply = asked(run, state, self.conversation, able, self.ports)
        checks = self._checks_of_input(able)
        if not checks:
            made = await reply
        else:
            guardrails = self._guardrails_of(able)
            given = state.input or self.conversation.view
            before = [each for each in checks if not each.parallel]
            beside = [each for each in checks if each.parallel]
            try:
                await guardrails.check_in_order(before, given)
            except BaseException:
                reply.close()
                raise
            made = await (guardrails.beside(reply, beside, given) if beside else reply)
        self._reply = made
        self.state = self.state.with_usage(able.identity, made.spent)
        if self.ports.is_watched:
            self.ports.publish("usage", able.agent.name, msgspec.to_builtins(made.spent))
        return planned(made.items, able.identity, able.tools.keys(), able.handoffs.keys())

    def _checks_of_input(self, able: Abilities) -> list[InputGuardrail]:
        """The guardrails of the run's input that have not let it pass yet.

        Results name their guardrails, so those that share a name all run again.
        """
        if self.state.turn:
            return []
        results = [each for each in self.state.guardrails if each.kind == "input"]
        passed = {each.name for each in results if not each.tripped}
        checks = (*able.agent.input_guardrails, *self.run.config.input_guardrails)
        count = Counter(each.name for each in checks)
        return [each for each in checks if each.name not in passed or count[each.name] > 1]

    # --- calls -----------------------------------------------------------------------------------

    async def _acted(
        self,
        able: Abilities,
        calls: Sequence[PendingCall],
        *,
        told: Mapping[str, str] = MappingProxyType({}),
        known: bool = False,
    ) -> TurnDone:
        """The turn after all calls were made that may be made now.

        `told` are outputs of calls that are not made. Calls that are `known` were looked at in an
        earlier turn, and may have waited for a decision since.
        """
        outputs: dict[str, Output] = dict(told)
        handoff = next((call for call in calls if _is_handoff(able, call)), None)
        of_tools = [call for call in calls if call is not handoff]
        wanted = of_tools if known else await self._looked_at(able, of_tools, outputs)
        ready, waiting = await self._decided(able, wanted, outputs)
        self._calls = wanted
        error = await self._called(able, ready, outputs)
        for call_id in dict.fromkeys((*(call.call_id for call in calls), *told)):
            if call_id in outputs:
                self._add(able.agent, output_item(call_id, outputs[call_id]))
        if error is not None:
            raise error
        waits = self._nested.keys() | {call.call_id for call in waiting}
        done = [call.call_id for call in of_tools if call.call_id not in waits]
        self.state = with_tools_used(self.state.without_calls(done), of_tools)
        if waits:
            left = [call for call in wanted if call.call_id in waits]
            return self._interrupted([*left, *([handoff] if handoff else ())])
        if handoff is not None:
            return await self._handed_over(able, handoff)
        results = earlier_results(self.conversation.view) if known else []
        results += [
            ToolResult(call.tool.name, call.call_id, outputs[call.call_id]) for call in of_tools
        ]
        return await self._after_tools(able, results)

    async def _looked_at(
        self, able: Abilities, calls: Sequence[PendingCall], outputs: dict[str, Output]
    ) -> list[PendingCall]:
        """The calls of a new reply that are to be made, and whether people are asked about them."""
        caller = self._caller(able)
        wanted = []
        for call in calls:
            tool = able.tools[call.tool]
            if not await caller.needs_approval(tool, call):
                wanted.append(replace(call, needs_approval=False))
            elif (rejection := await caller.rejected_early(tool, call)) is None:
                wanted.append(call)
            else:
                outputs[call.call_id] = rejection
        return wanted

    async def _decided(
        self, able: Abilities, calls: Sequence[PendingCall], outputs: dict[str, Output]
    ) -> tuple[list[PendingCall], list[PendingCall]]:
        """The calls that may be made now, and those that wait for people.

        All decisions are looked at before any call is made: CallChanged comes before any effect.
        """
        ready, waiting = [], []
        for call in calls:
            decision = self.state.decision_for(call) if call.needs_approval else None
            if call.tool not in (await self._able_of(call, able)).tools:
                outputs[call.call_id] = f"There is no tool {call.tool.name!r} any more."
            elif call.needs_approval and decision is None:
                waiting.append(call)
            elif decision is not None and not decision.approved:
                outputs[call.call_id] = decision.rejection
            else:
                ready.append(call)
        return ready, waiting

    async def _called(
        self, able: Abilities, calls: Sequence[PendingCall], outputs: dict[str, Output]
    ) -> BaseException | None:
        """Make these calls, each of them to its end; answers the first error that ends the run.

        An output stays with its call whatever becomes of the others: what was done is known.
        """

        async def call_one(call: PendingCall) -> Exception | None:
            try:
                output = await self._output(able, call)
            except Exception as error:  # noqa: BLE001  raised once the other calls have ended
                if (text := withheld(error)) is not None:
                    outputs[call.call_id] = text
                elif call.call_id in self._started:
                    outputs[call.call_id] = UNCERTAIN
                return error
            if output is not None:
                outputs[call.call_id] = output
            return None

        try:
            if len(calls) == 1:
                return await call_one(calls[0])
            errors = await side_by_side([call_one(call) for call in calls])
        except BaseException:
            # The run was cancelled. Calls that were made are stored all the same, and so are those
            # that have begun: they may have taken effect, and must not be made again unawares.
            begun = [call.call_id for call in calls if call.call_id in self._started]
            ends = dict.fromkeys(begun, UNCERTAIN) | outputs
            self._made += [output_item(each, output) for each, output in ends.items()]
            raise
        return next((error for error in errors if error is not None), None)

    async def _output(self, able: Abilities, call: PendingCall) -> Output | None:
        """The output of a call; None if it waits for people within an agent used as a tool."""
        able = await self._able_of(call, able)
        tool = able.tools[call.tool]
        caller = self._caller(able)
        if not isinstance(tool, AgentTool):
            return await caller.output_of(tool, call)

        def note(inner: RunState) -> None:
            self._nested[call.call_id] = inner

        output = await run_inner(self.run, self.state, tool, call, self.ports, Turn, note)
        if output is not None and (inner := self._nested.pop(call.call_id, None)) is not None:
            self.state = self.state.with_usage(able.identity, inner.total_usage())
        return output

    async def _able_of(self, call: PendingCall, able: Abilities) -> Abilities:
        """The abilities of the agent that made a call; `able` are those of the turn's agent.

        They differ if the run was a realtime session, which may hand over while a call waits.
        """
        if call.agent == able.identity:
            return able
        return await self.run.book.abilities(call.agent, self.run.context)

    # --- after the calls -------------------------------------------------------------------------

    async def _after_tools(self, able: Abilities, results: list[ToolResult]) -> TurnDone:
        rule = able.agent.after_tools
        if callable(rule):
            output = await called_back("after_tools", able.agent, rule, self.run.context, results)
            if output is not None:
                await self._check_output(able, output)
                return self._done("final", output=output)
        elif (last := final_result(rule, results)) is not None:
            return await self._finished(able, last.output)
        return self._done("next")

    async def _handed_over(self, able: Abilities, call: PendingCall) -> TurnDone:
        """The turn whose handoff, the last of its calls, gives the run to another agent."""
        handoff, agent = able.handoffs[call.tool.name], able.agent
        self.state = self.state.without_calls([call.call_id])
        try:
            given = handoff.decode(call.arguments)
        except WrongArguments as error:
            self._add(agent, output_item(call.call_id, str(error)))
            return self._done("next")

        async def make(_is_repeat: bool) -> Output:
            return await told_of_handoff(agent, handoff, self.run.context, given)

        if handoff.on_handoff is None:
            output = await make(False)
        else:
            key = key_of(self.run.path, call.call_id)
            output = await self.ports.call(call, key, None, make)
        self._add(agent, output_item(call.call_id, output))
        done = self._done("next", self.run.book.identity(handoff.agent))
        rule = handoff.input_filter or self.run.config.handoff_input_filter
        if rule is None:
            return done
        earlier = self.conversation.view
        about_turn = HandoffInput(earlier, list(self._made), call.arguments)
        items = await called_back("the filter of a handoff", agent, rule, about_turn)
        view = done.conversation.with_view(listed("the filter of a handoff", agent, items))
        return changed(done, state=view.in_state(done.state), conversation=view)

    # --- the end of the turn ---------------------------------------------------------------------

    async def _finished(
        self, able: Abilities, said: Output | None, of_reply: Sequence[Item] = ()
    ) -> TurnDone:
        """The last turn, once the guardrails of the output have let it pass.

        `said` is the final output as the model, or a tool, has given it. `of_reply` are the items
        of a reply that is the final output; messages that may not be stored are left out of them.
        """
        try:
            output = _decoded(able, said)
            await self._check_output(able, output)
        except BaseException:
            if of_reply:
                self._made = without_final_message(of_reply)
            raise
        self._show(able.agent, of_reply)
        done = self._done("final", output=output)
        if of_reply and self._reply is not None:
            done = changed(done, response_id=self._reply.response_id)
        return done

    async def _check_output(self, able: Abilities, output: Any) -> None:
        checks = (*able.agent.output_guardrails, *self.run.config.output_guardrails)
        await self._guardrails_of(able).check_output(checks, output)

    def _done(self, step: Step, agent: AgentId | None = None, output: Any = None) -> TurnDone:
        conversation, items = self._with_items(self._made)
        state = conversation.in_state(self.state.after_turn(agent=agent))
        return TurnDone(state, conversation, items, step, output)

    def _interrupted(self, waiting: Sequence[PendingCall]) -> TurnDone:
        """The turn that waits for people; it is completed, and counted, when its calls are made."""
        state = replace(self.state, calls=(), nested={}).with_calls(waiting)
        state = replace(state.after_turn(), turn=state.turn, nested=self._nested)
        conversation, items = self._with_items(self._made)
        return TurnDone(conversation.in_state(state), conversation, items, "interrupted")

    def _with_items(self, made: Sequence[Item]) -> tuple[Conversation, list[Item]]:
        """The conversation with these items of the turn stored, and all that is to be stored."""
        of_reply, response_id = 0, None
        if self._reply is not None:
            of_reply = sum(item.get("type") != _OUTPUT for item in made)
            response_id = self._reply.response_id
        after = self.conversation.with_turn(made, replied=of_reply, response_id=response_id)
        known = 0 if after.has_history else len(self.conversation.new)
        return after.stored(), list(after.new[known:])

    # --- small parts -----------------------------------------------------------------------------

    def _guardrails_of(self, able: Abilities) -> Guardrails:
        return Guardrails(able.agent, able.identity, self.run.context, self._report)

    def _caller(self, able: Abilities) -> ToolCaller:
        return ToolCaller(
            able,
            self.run,
            self.state.code,
            self.ports,
            self._guardrails_of(able),
            self._note_code,
            self._started,
        )

    def _report(self, result: GuardrailResult) -> None:
        self.state = self.state.with_guardrails([result])
        if self.ports.is_watched:
            self.ports.publish("guardrail", result.agent.name, shown(result))

    def _note_code(self, code: CodeSession) -> None:
        self.state = self.state.with_code(code)

    def _add(self, agent: Agent, item: Item) -> None:
        self._made.append(item)
        self._show(agent, [item])

    def _show(self, agent: Agent, items: Sequence[Item]) -> None:
        if self.ports.is_watched:
            for item in items:
                self.ports.publish("item", agent.name, item)


def _has_outputs(inner: RunState) -> bool:
    """Whether tools were called within an inner run, so that it must not begin again."""
    return bool(inner.nested) or any(each.get("type") == _OUTPUT for each in inner.held_items)


def _is_handoff(able: Abilities, call: PendingCall) -> bool:
    return call.tool not in able.tools and call.tool.name in able.handoffs


def _decoded(able: Abilities, said: Output | None) -> Any:
    """The final output, which has to be of the agent's output type."""
    if able.output_type.is_text:
        return said or ""
    if said is None:
        raise ModelMisbehaved("its reply has neither a final output nor a call")
    return able.output_type.decode(
        said if isinstance(said, str) else msgspec.json.encode(said).decode()
    )
