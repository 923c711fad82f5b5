"""The environment of the processes of a cluster."""

import json
import re
from pathlib import Path

from tests.launcher.programs import finish

TELL = "note(f'{name}.json', json.dumps(config))"


def read_configs(folder: Path) -> dict[str, dict]:
    return {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}


def test_workers_alone(launch, tmp_path):
    status, _, _ = finish(launch(TELL, 3))
    assert status == 0
    configs = read_configs(tmp_path)
    assert set(configs) == {"worker-0", "worker-1", "worker-2"}
    for index in range(3):
        assert configs[f"worker-{index}"]["task"] == {"type": "worker", "index": index}
    clusters = [config["cluster"] for config in configs.values()]
    assert clusters[0] == clusters[1] == clusters[2]
    assert set(clusters[0]) == {"worker"}
    addresses = clusters[0]["worker"]
    assert len(set(addresses)) == 3
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+", address) for address in addresses)


def test_parameter_servers_come_with_a_chief(launch, tmp_path):
    # Others may be ended as soon as the chief is done.
    others = "('worker-0.json', 'worker-1.json', 'ps-0.json')"
    status, _, _ = finish(launch(TELL + f"\nif kind == 'chief': wait_for(*{others})", 2, 1))
    assert status == 0
    configs = read_configs(tmp_path)
    assert set(configs) == {"chief-0", "worker-0", "worker-1", "ps-0"}
    for name, config in configs.items():
        kind, index = name.split("-")
        assert config["task"] == {"type": kind, "index": int(index)}
        sizes = {kind: len(addresses) for kind, addresses in config["cluster"].items()}
        assert sizes == {"chief": 1, "worker": 2, "ps": 1}


def test_one_worker_is_a_cluster_too(launch, tmp_path):
    status, _, errors = finish(launch(TELL, 1))
    assert (status, errors) == (0, "")
    assert set(read_configs(tmp_path)) == {"worker-0"}
    assert not (tmp_path / "logs").exists()
