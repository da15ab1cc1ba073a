"""Cart-pole by policy gradients: mean return against trajectories, three seeds. Needs gymnasium (extra `solvers-policy`).

python examples/solvers/policy.py --out policy.html
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gymnasium
import numpy as np
import plotly.graph_objects as go

from trainwright.solvers.policy import HARPG, NPGIGT, REINFORCE, SoftmaxMLP, evaluate, learn

SEEDS = 3


def draw(figure: go.Figure, name: str, color: str, num: list[float], returns: np.ndarray) -> None:
    """The mean over the seeds, and a band from the lowest to the highest."""
    figure.add_scatter(
        x=[*num, *num[::-1]], y=[*returns.max(0), *returns.min(0)[::-1]], fill="toself", fillcolor=f"rgba({color},0.15)",
        line={"width": 0}, hoverinfo="skip", showlegend=False,
    )  # fmt: skip
    figure.add_scatter(x=num, y=returns.mean(0), name=name, mode="lines+markers", line={"color": f"rgb({color})"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("policy.html"))
    parser.add_argument("--env", default="CartPole-v1", help="an environment of gymnasium with discrete actions")
    parser.add_argument("--trajectories", type=int, default=480)
    arguments = parser.parse_args()
    env = gymnasium.make_vec(arguments.env, num_envs=16)
    num_inputs, num_actions = env.single_observation_space.shape[0], env.single_action_space.n
    methods = {
        "REINFORCE, normalised": (REINFORCE(step=0.1, normalized=True), "136,136,136"),
        "N-PG-IGT": (NPGIGT(step=0.3, step_power=0.5), "37,99,235"),
        "N-HARPG": (HARPG(step=0.3, normalized=True), "217,119,6"),
    }
    figure = go.Figure()
    for name, (method, color) in methods.items():
        returns, finals = [], []
        for seed in range(SEEDS):
            result = learn(
                env, SoftmaxMLP(num_inputs, num_actions, seed=seed), method=method, max_iterations=10**6, batch_size=16,
                horizon=200, max_evaluations=arguments.trajectories, use_baseline=True, keep_history=True, seed=seed,
            )  # fmt: skip
            returns.append(result.history["mean_return"])
            finals.append(float(evaluate(env, result.policy, num_trajectories=32, horizon=200, seed=1).mean()))
        draw(figure, name, color, result.history["ntraj"], np.array(returns))
        print(f"{name:22s} {', '.join(f'{final:.0f}' for final in finals)} after {result.ntraj} trajectories")
    figure.update_layout(
        title=f"{arguments.env}: return of a batch against trajectories, mean and range of {SEEDS} seeds", template="plotly_white",
        xaxis_title="trajectories", yaxis_title="mean return",
    )  # fmt: skip
    figure.write_html(arguments.out, include_plotlyjs=True)


if __name__ == "__main__":
    main()
