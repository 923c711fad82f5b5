"""Names of tasks, and their ports."""

from ddl.launcher.tasks import ClusterTask, cluster_tasks, free_ports


def test_ports_are_free_and_different():
    ports = free_ports(200)
    assert len(set(ports)) == 200


def test_names_of_tasks():
    assert [str(task) for task in cluster_tasks(1, 1)] == ["chief", "worker 0", "ps 0"]
    assert cluster_tasks(1) == [ClusterTask("worker", 0)]
