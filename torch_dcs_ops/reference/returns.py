"""Temporal differences, their discounted sums and what reinforcement learning makes of them, in plain PyTorch.

`dcs::_temporal_difference_scan`, one step after the other along `dim`, from the last one back:

    end_t    = terminated_t or truncated_t, a nonzero float flag counts as set: nothing is carried over from step t + 1
    v'_t     = next_values_t; without next_values: values_{t+1}, at the last step bootstrap_value (None: 0), and 0
               where truncated_t, as values_{t+1} is the next episode's
    boot_t   = gamma_t·(1 - terminated_t)·v'_t, and 0 where terminated_t is 1, whatever v'_t is
    delta_t  = min(clip_rho, rho_t)·(r_t + boot_t - v_t)
    c_t      = gamma_t·lambda_t·min(clip_c, rho_t)
    A_t      = delta_t + c_t·A_{t+1}, and delta_t where end_t and at the last step      (advantages)
    target_t = A_t + v_t
    pg_t     = min(clip_pg, rho_t)·(r_t + boot_t + gamma_t·lambda_t·A_{t+1} - v_t), the product with A_{t+1} left out
               where end_t and at the last step

With rho 1 this is generalised advantage estimation (Schulman et al., 2016, https://arxiv.org/abs/1506.02438, equation
16), else V-trace (Espeholt et al., 2018, https://arxiv.org/abs/1802.01561, section 4.1; its policy-gradient advantage
with lambda as rlax has it: the next state's estimate is v'_t + lambda_t·(target_{t+1} - v_{t+1})).

Without `values` there is no A, rhos is None and only the targets can be asked for: they are the lambda-returns (Sutton
and Barto, 2nd edition, equation 12.18)

    target_t = r_t + boot_t + c_t·(target_{t+1} - v'_t), and r_t + boot_t where end_t and at the last step

with v'_t = next_values_t, or (without next_values) 0 but for bootstrap_value at the last step. It is evaluated as
``r_t + (gamma_t - c_t)·v'_t + c_t·target_{t+1}``, in which a v'_t with the factor 0 (lambda 1) is not read.

gamma and trace (lambda): the number where the tensor is None; a tensor with rewards' number of dimensions broadcasts
against rewards (one a step), one with fewer against rewards' shape without dim (one a row). A minimum with a NaN rho is
NaN. A NaN or an infinity reaches every step that the recurrence carries it to.
"""
