"""An OpenEnv server: guess a number from 1 to 7. Run in an interpreter that has openenv and nothing else: PORT."""

import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    number: int


class Hint(Observation):
    text: str = ""


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.secret, self._state = 0, State(episode_id="", step_count=0)

    def reset(self, seed=None, episode_id=None, **_):
        self.secret, self._state = (seed or 0) % 7 + 1, State(episode_id=episode_id or "", step_count=0)
        return Hint(text="Guess a number from 1 to 7.", done=False, reward=0.0)

    def step(self, action, timeout_s=None, **_):
        self._state.step_count += 1
        right = action.number == self.secret
        text = "right" if right else "more" if action.number < self.secret else "less"
        return Hint(text=text, done=right, reward=float(right))

    @property
    def state(self):
        return self._state


if __name__ == "__main__":
    app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=128)
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning")
