"""A software engineer in a container: the policy gives shell commands until it says what it has done; then tests run.

The row's extra_info names the container's image, and the command `test`, whose exit status 0 is a reward of 1. How
containers start, run a command and stop are lists of words, in which {image}, {name}, {command} and {seconds} are
replaced.
"""

import asyncio
import contextlib
import json
import os
import signal
import time
import uuid

from openai import AsyncOpenAI, BadRequestError, ConflictError

CLIENT = AsyncOpenAI(api_key="", base_url="http://127.0.0.1", max_retries=2, timeout=None)
OUTPUT_CHARACTERS_MAX = 8000
GRACE_SECONDS = 10
"""For `timeout {seconds}` in the container to end a command, which a killed client would leave there."""
SYSTEM = (
    "You work in a Linux container on the repository in the working directory. Run shell commands with the tool bash, "
    "one at a time; each begins in a new shell. When the task is done, say so without calling the tool."
)
COMMAND = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
BASH = {"name": "bash", "description": "Runs a command in bash and returns what it prints.", "parameters": COMMAND}


async def rollout(task, endpoint, *, start, run, stop, command_seconds=120, test_seconds=900):
    """1 if the tests pass, else 0, and how many commands ran."""
    container = {"image": task.extra_info["image"], "name": f"megagrpo-{uuid.uuid4().hex[:16]}"}
    try:
        status, output = await done(start, container, seconds=test_seconds)
        if status != 0:
            raise RuntimeError(f"the container of {container['image']} does not start: {output[-300:]}")

        async def shell(command):
            return await done(run, {**container, "command": command}, seconds=command_seconds)

        commands = await work(task, endpoint, shell)
        status, output = await done(run, {**container, "command": task.extra_info["test"]}, seconds=test_seconds)
        endpoint.event("test", status=status, output=output[-2000:])
        return {"score": float(status == 0), "commands": commands}
    finally:
        await done(stop, container, seconds=60)


async def work(task, endpoint, shell):
    """Does what the policy says until it calls no tool or is at a limit; the number of commands."""
    policy = CLIENT.with_options(base_url=endpoint.base_url, api_key=endpoint.api_key)
    messages = [{"role": "system", "content": SYSTEM}, *task.messages]
    tools = [{"type": "function", "function": BASH}]
    commands = 0
    while True:
        try:
            answer = await policy.chat.completions.create(model=endpoint.model, messages=messages, tools=tools)
        except (BadRequestError, ConflictError):  # no turn or no room is left: what is done so far is tested
            return commands
        said = answer.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        if not said.tool_calls:
            return commands
        for call in said.tool_calls:
            began = time.monotonic()
            try:
                status, output = await shell(json.loads(call.function.arguments)["command"])
                error = "" if status == 0 else f"exit status {status}"
            except (ValueError, KeyError, TypeError):
                output, error = 'give {"command": "..."}', "not a command"
            commands += 1
            endpoint.event("tool", name="bash", seconds=time.monotonic() - began, error=error, result=output[-2000:])
            text = f"{output}\n({error})" if error else output or "(no output)"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})


async def done(words, values, seconds):
    """Runs a command; its exit status and what it printed, shortened in the middle. 124: it took too long."""
    words = [filled(word, {**values, "seconds": seconds}) for word in words]
    process = await asyncio.create_subprocess_exec(
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), seconds + GRACE_SECONDS)
    except TimeoutError:
        return 124, f"not over after {seconds} seconds"
    finally:  # also if the rollout is cancelled
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    text = output.decode(errors="replace")
    half = OUTPUT_CHARACTERS_MAX // 2
    return process.returncode, text if len(text) <= 2 * half else f"{text[:half]}\n[...]\n{text[-half:]}"


def filled(word, values):
    """The word with {image}, {name}, {command} and {seconds} replaced; other braces stay."""
    for name in ("image", "name", "seconds"):
        word = word.replace("{" + name + "}", str(values[name]))
    return word.replace("{command}", values.get("command", ""))
