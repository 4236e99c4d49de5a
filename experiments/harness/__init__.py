"""What runs the experiments and writes their page: plans, processes, records, tables.

SPDX-License-Identifier: Apache-2.0
"""
