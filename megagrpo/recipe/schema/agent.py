"""agent: the program that asks the policy, if a response is more than one answer to a prompt. See docs/agents.md; for
its tools, docs/agents_tools.md."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from megagrpo.section import FILE_AND_FUNCTION, Count, Rules, Seconds, Section, Tokens

Memory = Annotated[int, Field(ge=16, le=2**24)]
KINDS = ("tools", "function", "verifiers", "openenv", "reasoning_gym")


class ToolConfig(Section):
    """One tool, or all tools of an MCP server."""

    name: str
    """python, FILE.py:NAME of a function or class of your own (examples/agents/ has some for search), or with `mcp` a
    name of your choice."""

    call_name: Annotated[str, Field(pattern=r"^[A-Za-z_][\w-]{0,63}$")] | None = None
    """Name under which the policy calls it. null: its own name. Not for a server or package with several tools."""

    mcp: str | None = None
    """An MCP server: the command that starts it, or its URL. All of its tools are offered."""

    stateful: bool = False
    """Each rollout has a state of its own: python keeps its variables from call to call; an MCP server is started, or a
    session with it begun, for each rollout. Classes of your own always have an object for each rollout."""

    timeout_seconds: Seconds = 60.0
    """Longest time of one call. The policy is then told that it took too long."""

    calls_at_once: Count = 64
    """Calls that run at the same time in one agent process. Others wait; their time does not count."""

    result_characters_max: Annotated[int, Field(ge=16, le=10**8)] = 10_000
    """Longest result that the policy gets. What is in the middle of a longer one is left out."""

    arguments: dict[str, Any] = {}
    """Settings of the tool, such as memory_mib for python; for a function of your own, values of parameters that the
    policy does not see; for a class, arguments of its constructor."""

    @property
    def own(self) -> bool:
        """Returns whether the tool is FILE.py:NAME."""
        return self.mcp is None and ".py:" in self.name

    RULES: ClassVar[Rules[ToolConfig]] = {
        "stateful_function": lambda tool: tool.stateful and not tool.mcp and tool.name != "python"
    }


# Arguments of the tools that are not the user's own. They are read when the tool is known: its name says which.


class PythonArguments(Section):
    memory_mib: Memory = 1024
    packages: bool = False
    """Programs may import what is installed."""

    imports: list[Annotated[str, Field(pattern=r"^[^\W\d]\w*(\.[^\W\d]\w*)*$")]] = []
    """Modules that are imported before, once for all programs."""

    isolation: Literal["auto", "bubblewrap", "seccomp", "none"] = "auto"


class McpArguments(Section):
    tools: list[str] | None = None
    """Only these."""

    headers: dict[str, str] = {}
    """Headers of HTTP requests. $NAME stands for an environment variable, so that no key has to be in a recipe."""

    env: dict[str, str] = {}
    """More environment variables of the command; $NAME as in headers."""


class VerifiersConfig(Section):
    """An environment of the verifiers package, in an interpreter that has it (agent.python). Rows are made by
    `megagrpo prepare verifiers`. See docs/agents_environments.md."""

    environment: str
    """Name for vf.load_environment (0.2), or of a task set (0.3 and later); or FILE.py:FUNCTION. The function returns
    an environment, a task set or a list of tasks."""

    arguments: dict[str, Any] = {}
    """Keyword arguments of the environment, or the task set's settings."""

    harness: str | dict[str, Any] = "null"
    """0.3 and later: the program that does the task, by name or as {id: NAME, ...}. null: the conversation and the
    task's tools."""

    runtime: dict[str, Any] = {"type": "subprocess"}
    """0.3 and later: where the harness runs, such as {type: docker}. A harness that runs the policy's commands should
    not run in a subprocess."""


class OpenEnvConfig(Section):
    """An OpenEnv server, asked by its generic client in an interpreter that has it (agent.python)."""

    url: str
    """Such as http://host:8000."""

    arguments: dict[str, Any] = {}
    """Keyword arguments of `reset`. The row's seed, and its extra_info.reset, are added."""

    observation: str | None = None
    """Text for the policy: a field of the observation, or FILE.py:FUNCTION of an observation. null: its only text, else
    all of it as JSON."""

    action: str | None = None
    """The action that an answer makes: the action's field that gets the text, or FILE.py:FUNCTION of the text, which
    returns an action. null: the last JSON object in the answer."""

    timeout_seconds: Seconds = 60.0
    """Longest time of a step."""


class ReasoningGymConfig(Section):
    """Tasks of reasoning-gym as conversations: the policy is told of a wrong answer, and may answer again. Rows are
    those of data.train: [{reasoning_gym: TASK}]."""

    attempts_max: Count = 3
    """Answers until a right one."""

    counts: Literal["last", "best"] = "last"
    """The answer that is scored."""

    extract: Literal["tags", "last_line", "either"] = "tags"
    """The answer in a response: in <answer>…</answer>, its last line, or either."""

    wrong: str = "That is not right. Try again, and give your answer in the same form."
    """The message to the policy after a wrong answer."""

    isolation: Literal["auto", "bubblewrap", "seccomp", "none"] = "auto"
    """Isolation of the scorers of answers, as in the reward function reasoning_gym."""


class AgentConfig(Section):
    """The agent that asks the policy: one of tools, function, verifiers, openenv and reasoning_gym."""

    tools: list[str | ToolConfig] = []
    """The built-in loop: the policy may call these tools, turn after turn, until it answers without a call."""

    function: Annotated[str, Field(pattern=FILE_AND_FUNCTION)] | None = None
    """FILE.py:FUNCTION, `async def rollout(task, endpoint)`: any program that asks an OpenAI-compatible endpoint.
    Returns a reward, a mapping with one, or None."""

    verifiers: VerifiersConfig | None = None
    openenv: OpenEnvConfig | None = None
    reasoning_gym: ReasoningGymConfig | None = None

    arguments: dict[str, Any] = {}
    """Keyword arguments of the function."""

    python: str | None = None
    """Interpreter that runs the agent, if it needs packages of an environment of its own. null: the run's."""

    environment: list[str] = []
    """Names of environment variables that agents see beside harmless ones such as PATH, for example a token."""

    processes: Count = 1
    """Processes that run agents, each with many rollouts. One that dies costs the rollouts in it."""

    rollouts_at_once: Count = 256
    """Rollouts that have begun and not ended. Others wait. Those that stand still while engines get weights leave room
    for others: once they go on, there may be up to twice as many for a while."""

    turns_max: Count = 20
    """Most answers of the policy in a rollout."""

    tokens_max: Tokens | None = None
    """Most tokens of a conversation, all of its turns and what stands between them.
    null: data.prompt_tokens_max + rollout.response_tokens_max. rollout.response_tokens_max is for one answer."""

    timeout_seconds: Seconds = 1800.0
    """Longest time of a rollout, tools included."""

    turn_timeout_seconds: Seconds | None = None
    """Longest time of one answer of the policy, waits for an engine included. A rollout with a longer one is late.
    null: as long as the rollout."""

    when_late: Literal["mask", "score"] = "mask"
    """Treatment of a rollout that takes longer. mask: it is not trained on. score: it ends as it is, truncated, and
    reward functions score it."""

    when_failed: Literal["mask", "score"] = "mask"
    """Treatment of a rollout whose agent raises, whose process ends, or that an engine gives up on. mask: it is not
    trained on. score: it ends as it is, truncated, and reward functions score it. A step in which all fail ends the run
    in any case."""

    parser: str = "auto"
    """Format of the policy's tool calls: a form of megagrpo, such as hermes, qwen3_coder or gpt-oss (docs/agents.md),
    or a name that SGLang has, such as gemma4, where it is installed. auto: what the chat template shows."""

    history: Literal["template", "append"] = "template"
    """Reasoning of earlier turns that the chat template leaves out. template: it is left out, and the conversation goes
    on in a new branch. append: it is kept, in one branch."""

    template_arguments: dict[str, Any] = {}
    """Arguments of the chat template, such as enable_thinking: false."""

    @property
    def tool_configs(self) -> list[ToolConfig]:
        """Returns the tools, each as a ToolConfig."""
        return [ToolConfig(name=tool) if isinstance(tool, str) else tool for tool in self.tools]

    @property
    def kind(self) -> str:
        """Returns the one of KINDS that is given."""
        return self.kinds[0]

    @property
    def kinds(self) -> list[str]:
        """Returns those of KINDS that are given; exactly one in a correct recipe."""
        return [name for name in KINDS if getattr(self, name)]

    RULES: ClassVar[Rules[AgentConfig]] = {
        "no_agent": lambda agent: not agent.kinds,
        "several_agents": lambda agent: ({"last": agent.kinds[-1]} for _ in range(len(agent.kinds) > 1)),
        "arguments_without_function": lambda agent: agent.arguments and not agent.function,
        "python_of_the_built_in_loop": lambda agent: agent.python and agent.tools,
        "python_of_reasoning_gym": lambda agent: agent.python and agent.reasoning_gym,
    }
