"""Shares of a labelled data set for the workers, unequal in labels and in size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Dataset, Subset, TensorDataset

from exogym_core.successors import refuse_unknown_options
from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["Partition"]


class Partition:
    """Deal a labelled data set out to workers by its labels; given to `fit` in place of the data set.

    A worker passes through its own samples, over and over, in an order drawn for each of its epochs; nothing is left
    out. Every sample belongs to one worker, and every worker has one at least.

    `dirichlet=alpha`: the samples of each label are dealt out in shares drawn from a symmetric Dirichlet distribution,
    so that workers differ in labels and in size; all the more, the smaller alpha is. A worker that has drawn nothing
    gets a sample of the largest share.

    `labels_per_client=k`: each worker has samples of k labels, those held by the fewest workers so far, drawn among
    equals; the samples of a label are dealt out evenly to the workers that hold it.

    Args:
        dataset: with a length, of samples `(input, label)` with a whole number as label.
        dirichlet: alpha, above 0.
        labels_per_client: k, at most the number of labels.
        seed: of the draws.

    Raises:
        InputError: not exactly one of both is given, or the labels cannot be dealt out so.

    References:
        Yurochkin et al., Bayesian Nonparametric Federated Learning of Neural Networks, arXiv 1905.12022 (Dirichlet);
        McMahan et al., arXiv 1602.05629 (two labels a client). Both as in Li et al., Federated Learning on Non-IID
        Data Silos, arXiv 2102.02079.

    >>> shares = Partition([(None, label) for label in (0, 0, 1, 1)], labels_per_client=1).shares(2)
    >>> sorted(map(sorted, (each.tolist() for each in shares)))
    [[0, 1], [2, 3]]
    """

    def __init__(
        self,
        dataset: Any,
        *,
        dirichlet: float | None = None,
        labels_per_client: int | None = None,
        seed: int = 0,
    ) -> None:
        if (dirichlet is None) == (labels_per_client is None):
            raise InputError("partition: give either dirichlet or labels_per_client, as in {dirichlet: 0.3}")
        if dirichlet is not None and not (_is_number(dirichlet) and 0 < dirichlet < float("inf")):
            raise InputError(
                f"partition: dirichlet={dirichlet!r} must be a number above 0, such as 0.3",
                about=("dirichlet",),
            )
        for name, value, least in (("labels_per_client", labels_per_client, 1), ("seed", seed, 0)):
            if value is not None and not (isinstance(value, int) and _is_number(value) and value >= least):
                raise InputError(
                    f"partition: {name}={value!r} must be a whole number of at least {least}", about=(name,)
                )
        self.dataset, self._alpha, self._count, self._seed = dataset, dirichlet, labels_per_client, seed
        self._labels = _labels_of(dataset)
        self._shares: dict[int, Sequence[NDArray[np.int64]]] = {}  # by number of workers

    @classmethod
    def of(cls, dataset: Any, options: object) -> Partition:
        """Partition by the options of a file, such as `{dirichlet: 0.3, seed: 1}`.

        Raises:
            UnknownNameError: no such option.
            InputError: as for the class.
        """
        if not isinstance(options, Mapping):
            raise InputError(f"partition: {options!r} must be a mapping such as {{dirichlet: 0.3}}")
        refuse_unknown_options("option of partition", cls, {"dataset": dataset, **options})
        return cls(dataset, **options)

    def __call__(self, rank: int, num_nodes: int, train_dataset: bool) -> Dataset[Any]:
        """Share of a worker, as a factory of `fit` returns it."""
        return Subset(self.dataset, self.shares(num_nodes)[rank].tolist())

    def sizes(self, num_clients: int) -> list[int]:
        """Numbers of samples of all workers."""
        return [len(share) for share in self.shares(num_clients)]

    def shares(self, num_clients: int) -> Sequence[NDArray[np.int64]]:
        """Indices of each worker's samples, ascending.

        Raises:
            InputError: there are fewer samples than workers, or not enough workers for all labels.
        """
        if num_clients not in self._shares:
            self._shares[num_clients] = self._deal(num_clients)
        return self._shares[num_clients]

    def _deal(self, num_clients: int) -> Sequence[NDArray[np.int64]]:
        if len(self._labels) < num_clients:
            raise InputError(
                f"partition: {len(self._labels)} samples for {num_clients} workers, and each needs one; "
                "use fewer workers"
            )
        draws = np.random.default_rng([self._seed, num_clients])
        kinds = np.unique(self._labels)
        of_label = {kind: draws.permutation(np.flatnonzero(self._labels == kind)) for kind in kinds.tolist()}
        parts: list[list[NDArray[np.int64]]] = [[] for _ in range(num_clients)]
        if self._count is None:
            for indices in of_label.values():
                weights = draws.dirichlet(np.full(num_clients, self._alpha))
                ends = (np.cumsum(weights)[:-1] * len(indices)).round().astype(int)
                for part, indices_of_client in zip(parts, np.split(indices, ends), strict=True):
                    part.append(indices_of_client)
        else:
            holders = self._holders(kinds, num_clients, draws)
            for kind, indices in of_label.items():
                for client, dealt in zip(
                    holders[kind], np.array_split(indices, len(holders[kind])), strict=True
                ):
                    parts[client].append(dealt)
        shares = [np.sort(np.concatenate(part)) for part in parts]
        for client, share in enumerate(shares):
            if not len(share):
                largest = max(range(num_clients), key=lambda other: len(shares[other]))
                shares[client], shares[largest] = shares[largest][-1:], shares[largest][:-1]
        return shares

    def _holders(
        self, kinds: NDArray[Any], num_clients: int, draws: np.random.Generator
    ) -> dict[Any, list[int]]:
        """Workers that hold each label."""
        assert self._count is not None
        if self._count > len(kinds):
            raise InputError(
                f"partition: labels_per_client={self._count}, but the data set has {len(kinds)} labels; "
                "give at most those",
                about=("labels_per_client",),
            )
        if self._count * num_clients < len(kinds):
            raise InputError(
                f"partition: {num_clients} workers with {self._count} labels each hold not all {len(kinds)} labels; "
                "use more workers or labels_per_client"
            )
        holders: dict[Any, list[int]] = {kind: [] for kind in kinds.tolist()}
        for client in range(num_clients):
            order = draws.permutation(kinds).tolist()
            for kind in sorted(order, key=lambda kind: len(holders[kind]))[: self._count]:
                holders[kind].append(client)
        return holders


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _labels_of(dataset: Any) -> NDArray[np.int64]:
    """Label of each sample."""
    try:
        if type(dataset) is TensorDataset and len(dataset.tensors) == 2 and dataset.tensors[1].dim() == 1:
            labels = dataset.tensors[1].numpy()
        else:
            labels = np.asarray([dataset[index][1] for index in range(len(dataset))])
        if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
            raise TypeError(f"labels are {labels.dtype}{list(labels.shape[1:])}")
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            "partition: the training set must have a length, and samples (input, label) with a whole number as label; "
            f"{type(dataset).__name__} has not: {error}"
        ) from error
    return labels.astype(np.int64)
