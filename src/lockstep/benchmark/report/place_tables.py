"""Tables of where a benchmark ran and what was exchanged: nodes, devices, exchanges."""

from collections import Counter
from collections.abc import Iterator, Sequence

from lockstep.benchmark.amounts import NOTHING, count, digits, num_bytes, percent, seconds
from lockstep.benchmark.report.content import Cell, Column, Row, Table
from lockstep.benchmark.report.plain import core_list, without_empty
from lockstep.benchmark.schema import Bundle, DeviceUse, NodeHardware, Runtime, Use


def exchange_table(runtime: Runtime) -> Iterator[Table]:
    """Yield the exchanges between ranks, if they were seen."""
    if not runtime.exchanges:
        return
    columns = (
        Column("exchange", is_number=False),
        Column("per iteration", "", "how often"),
        Column("message", "", "of each rank, each time"),
        Column("communication", "", "each time: the shortest wait of all ranks"),
        Column("straggler wait", "", "each time: waiting for ranks that came later, mean over ranks"),
        Column("per iteration, together", "", "both, times how often"),
    )
    rows = tuple(
        Row(
            (
                Cell(each.tag),
                Cell(digits(each.num), each.num),
                Cell(num_bytes(each.num_bytes), each.num_bytes),
                Cell(seconds(each.communication_s), each.communication_s),
                Cell(seconds(each.straggler_wait_s), each.straggler_wait_s),
                Cell(seconds(each.num * (each.communication_s + each.straggler_wait_s))),
            )
        )
        for each in runtime.exchanges
    )
    yield Table("Exchanges between ranks", columns, rows, "All ranks take part in each; who comes first waits.")


def device_table(bundle: Bundle) -> Iterator[Table]:
    """Yield what was used of GPUs and cores, by whatever ran there."""
    if not bundle.resources:
        return
    hosts = {node.node: node.host for node in bundle.hardware}
    names = {gpu.uuid: gpu.name for node in bundle.hardware for gpu in node.gpus}
    columns = (
        Column("device", is_number=False),
        Column("host", is_number=False),
        Column("ranks", "", "that computed there", is_number=False),
        Column("use", "", "of a GPU's time, or of all cores that the job may use"),
        Column("memory"),
        Column("UUID", is_number=False),
        Column("PCI bus id", is_number=False),
    )
    rows = tuple(
        Row(
            (
                Cell(_device(each, names)),
                Cell(hosts.get(each.node, NOTHING)),
                Cell(core_list(each.ranks) if each.ranks else "none"),
                _percent_cell(each.percent),
                _memory_cell(each.memory_bytes),
                Cell(each.uuid or NOTHING),
                Cell(each.pci_bus_id or NOTHING),
            )
        )
        for each in bundle.resources
    )
    yield without_empty(Table("Devices", columns, rows, "Use by whatever ran there: mean, below it the peak."))


def _device(use: DeviceUse, names: dict[str, str]) -> str:
    return f"cores of node {use.node}" if use.kind == "cpu" else names.get(use.uuid or "", "GPU")


def _percent_cell(use: Use | None) -> Cell:
    return Cell(NOTHING) if use is None else Cell(percent(use.mean), use.mean, percent(use.peak), use.peak)


def _memory_cell(use: Use | None) -> Cell:
    return Cell(NOTHING) if use is None else Cell(num_bytes(use.mean), use.mean, num_bytes(use.peak), use.peak)


def node_table(nodes: Sequence[NodeHardware]) -> Table:
    """Return the hardware of every node."""
    columns = (
        Column("node"),
        Column("host", is_number=False),
        Column("CPU", is_number=False),
        Column("cores"),
        Column("allowed", "", "cores that the job may keep busy"),
        Column("memory"),
        Column("GPUs", is_number=False),
        Column("driver", is_number=False),
        Column("platform", is_number=False),
    )
    return without_empty(Table("Hardware of every node", columns, tuple(_node_row(node) for node in nodes)))


def _node_row(node: NodeHardware) -> Row:
    gpus = Counter((gpu.name, num_bytes(gpu.memory_bytes)) for gpu in node.gpus)
    drivers = sorted({gpu.driver for gpu in node.gpus})
    return Row(
        (
            Cell(str(node.node), node.node),
            Cell(node.host),
            Cell(node.cpu or NOTHING),
            Cell(count(node.num_cores), node.num_cores),
            Cell(count(node.num_allowed_cores), node.num_allowed_cores),
            Cell(num_bytes(node.memory_bytes), node.memory_bytes),
            Cell("; ".join(f"{number} x {name}, {memory}" for (name, memory), number in gpus.items()) or "none"),
            Cell(", ".join(drivers) or NOTHING),
            Cell(node.platform),
        )
    )
