"""The settings of the agents' host, from a recipe."""

from __future__ import annotations

from pathlib import Path

from megagrpo.agents.answers import Ask
from megagrpo.agents.chat import Chat
from megagrpo.agents.gateway import Gateway
from megagrpo.agents.processes import Program
from megagrpo.agents.tools.load import variables
from megagrpo.errors import AgentError, Problem, first_line
from megagrpo.recipe.schema import Recipe
from megagrpo.recipe.schema.agent import AgentConfig
from megagrpo.tokenizer import end_tokens, load_chat_tokenizer

MODEL = "policy"
"""The name of the policy at the gateway."""
BUILT_IN = {
    "tools": "tool_loop.py",
    "verifiers": "environments/verifiers.py",
    "openenv": "environments/openenv.py",
    "reasoning_gym": "environments/reasoning_gym.py",
}
"""The files beside this one that have `rollout`, by kind of agent."""


def gateway_of(recipe: Recipe, tokenizer_directory: Path, ask: Ask) -> Gateway:
    """Returns the recipe's gateway. Raises ModelError if there is no tokenizer with a chat template."""
    agent = recipe.agent
    if agent is None:
        raise ValueError("no agent")
    return Gateway(chat_of(recipe, tokenizer_directory), ask, model=MODEL, parser=agent.parser)


def chat_of(recipe: Recipe, tokenizer_directory: Path) -> Chat:
    """Returns a recipe's tokenizer and template, with every token that ends an answer. The recipe must have an agent.
    Raises ModelError if there is no tokenizer with a chat template."""
    agent = recipe.agent
    if agent is None:
        raise ValueError("no agent")
    tokenizer = load_chat_tokenizer(tokenizer_directory, recipe.model.chat_template)
    stops = {*recipe.rollout.stop_token_ids, *end_tokens(tokenizer_directory), *end_tokens(recipe.model.path)}
    return Chat(tokenizer, sorted(stops), history=agent.history, **agent.template_arguments)


def program_of(agent: AgentConfig) -> Program:
    """Returns the agents' program. Raises AgentError if the file cannot be read, RecipeError for arguments of tools."""
    if agent.function:
        name, _, function = agent.function.rpartition(":")
        file, arguments = Path(name).absolute(), agent.arguments
    else:
        file, function = Path(__file__).parent / BUILT_IN[agent.kind], "rollout"
        written = [tool.model_dump(mode="json") for tool in agent.tool_configs]
        arguments = {"tools": written} if agent.tools else getattr(agent, agent.kind).model_dump(mode="json")
    try:
        source = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise AgentError(Problem(f"agent.{agent.kind}", f"{file}: {first_line(error)}", "a file to read")) from None
    environment = [*agent.environment, *variables(agent.tool_configs)]
    return Program(str(file), source, function, arguments, agent.python, environment)
