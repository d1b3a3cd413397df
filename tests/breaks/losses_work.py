"""What ranks do in tests of losses; importable by name, as worker processes need it."""

import torch

import longspan as ls
from longspan import training
from tests.gloo.fault_work import Rank


class LossRank(Rank):
    """One rank of a fault case: every call is one of the functions of `longspan.training` that talk to other ranks."""

    def plan(self, **changes):
        return ls.layouts.zigzag(16 * self.case.world, self.case.world)

    def attention(self, plan, function=None, **options):
        values = torch.randn(1, 16, requires_grad=True, dtype=torch.float64)
        documents = {"documents": [5, 16 * self.case.world - 5]}
        gradients = {"gradients": "sum"}
        name = self.case.settings["function"]
        if name == "token_loss":
            logits, labels = torch.randn(16, 8, requires_grad=True), torch.randint(8, (16,))
            return training.token_loss(logits, labels, group=self.group, **gradients)
        if name == "gather_tokens":
            return training.gather_tokens(values, plan, self.group, **gradients)
        if name == "gather_outputs":
            found = training.gather_outputs(values.detach(), plan, self.group, -1, to=0)
            return torch.zeros((), requires_grad=True) if found is None else found.requires_grad_()
        if name == "relayout":
            return training.relayout(values, plan, ls.layouts.contiguous(plan.seq_len, plan.world_size), self.group, -1)
        if name == "per_sequence":
            return training.per_sequence(values, plan, self.group, **documents, **gradients)
        if name == "per_token":
            numbers = torch.randn(2, requires_grad=True)
            return training.per_token(numbers, plan, self.group, **documents, **gradients)
        assert name == "check_same"
        training.check_same({"input_ids": torch.arange(8)}, self.group)
        return values
