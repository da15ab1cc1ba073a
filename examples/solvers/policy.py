"""Cart-pole by policy gradients: mean return against trajectories. Needs gymnasium (extra `solvers-policy`).

python examples/solvers/policy.py --out policy.html
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gymnasium
import plotly.graph_objects as go

from trainwright.solvers.policy import HARPG, NPGIGT, REINFORCE, SoftmaxMLP, evaluate, learn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("policy.html"))
    parser.add_argument("--env", default="CartPole-v1", help="an environment of gymnasium with discrete actions")
    parser.add_argument("--trajectories", type=int, default=480)
    arguments = parser.parse_args()
    env = gymnasium.make_vec(arguments.env, num_envs=16)
    num_inputs, num_actions = env.single_observation_space.shape[0], env.single_action_space.n
    methods = {
        "REINFORCE, normalised": REINFORCE(step=0.1, normalized=True),
        "N-PG-IGT": NPGIGT(step=0.3, step_power=0.5),
        "N-HARPG": HARPG(step=0.3, normalized=True),
    }
    figure = go.Figure()
    for name, method in methods.items():
        result = learn(
            env, SoftmaxMLP(num_inputs, num_actions), method=method, max_iterations=10**6, batch_size=16, horizon=200,
            max_trajectories=arguments.trajectories, use_baseline=True, keep_history=True,
        )  # fmt: skip
        figure.add_scatter(x=result.history["ntraj"], y=result.history["mean_return"], name=name, mode="lines+markers")
        returns = evaluate(env, result.policy, num_trajectories=32, horizon=200, seed=1)
        print(f"{name:22s} {returns.mean():.0f} ± {returns.std():.0f} after {result.ntraj} trajectories")
    figure.update_layout(
        title=f"{arguments.env}: return of a batch against trajectories", template="plotly_white",
        xaxis_title="trajectories", yaxis_title="mean return",
    )  # fmt: skip
    figure.write_html(arguments.out, include_plotlyjs=True)


if __name__ == "__main__":
    main()
