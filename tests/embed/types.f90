! Types, kinds and sections that Fortran can pass. Each refused call prints "rank name code everywhere text".
program types
    use mpi
    use pmm3d
    use, intrinsic :: iso_c_binding, only: c_int, c_int64_t
    implicit none
    integer, parameter :: n = 8
    real, target :: single(n, n)
    double precision, target :: big(2*n, 2*n), a(n, n), b(n, n), c(n, n), small(n), line(n*n), cube(n, n, 1)
    complex(kind(1d0)), target :: x(n, n), y(n, n)
    double precision, allocatable, target :: shifted(:, :)
    integer :: ierr, rank, ranks, last, grid, context, desc(9), m(3), z(2), made, plan, plans(2), box(4)
    integer(c_int64_t) :: wide_box(4)
    integer(2) :: tiny(4) = [1_2, 8_2, 1_2, 8_2]
    logical :: right

    call MPI_Init(ierr)
    call MPI_Comm_rank(MPI_COMM_WORLD, rank, ierr)
    call MPI_Comm_size(MPI_COMM_WORLD, ranks, ierr)
    last = ranks - 1
    big = 1; a = 1; b = 1; c = 0; x = 1; y = 0; single = 1; line = 1; small = 0; cube = 0
    call ok(pmm3d_grid(MPI_COMM_WORLD, 1, 1, ranks, grid))
    call ok(pmm3d_context(MPI_COMM_WORLD, 1, 1, 'r', context))
    call ok(pmm3d_max_workspace(grid, 2_c_int64_t**40))
    call ok(pmm3d_max_workspace(context, 10**6))
    desc = [1, 0, n, n, 4, 4, 0, 0, n]

    ! Sizes of 4 and of 8 bytes, also mixed; lower case; a rank-1 array, an element, bounds other than 1.
    call ok(pmm3d_box(grid, 'a', n, int(n, c_int64_t), wide_box))
    call ok(pmm3d_box(grid, 'Zx/Y', n, n, box))
    right = all(wide_box == box)
    allocate (shifted(0:n - 1, -3:n - 4))
    shifted = 1
    call ok(pmm3d_matrix(grid, 'd', int(n, c_int64_t), n, '/', 'f', line, m(1)))
    call ok(pmm3d_matrix(grid, 'd', n, n, '/', 'F', shifted, m(2)))
    call ok(pmm3d_matrix(grid, 'd', n, n, '/', 'F', c(1, 1), m(3)))
    call ok(pmm3d_matrix(grid, 'z', n, n, '/', 'F', x, z(1)))
    call ok(pmm3d_matrix(grid, 'z', n, n, '/', 'F', y, z(2)))
    call ok(pmm3d_matmul('N', 'N', 1d0, m(1), m(2), 0d0, m(3)))
    right = right .and. all(c == n)
    call ok(pmm3d_matrix(grid, 'd', 2*n, 4, '/', 'F', big(:, 1:4), made)) ! whole columns: no gap
    call ok(pmm3d_free(made))
    big(1:n, 2) = 0
    call ok(pmm3d_matrix(grid, 'd', n, 1, '/', 'F', big(1:n, 2:2), made)) ! a part of one column
    call ok(pmm3d_from_blocks(line, [1, merge(n, 0, rank == 0), 1, 1], 'F', made))
    right = right .and. all(big == 1)
    call ok(pmm3d_free(made))
    call ok(pmm3d_matrix(grid, 'd', 4, 2*n, '/', 'C', big(1:2*n:1, 1:4), made)) ! by rows: the transposed array
    call ok(pmm3d_free(made))

    ! Wrong shards: a section, another type, sizes that are no integers; too few elements on the last rank only.
    call told('section', pmm3d_matrix(grid, 'd', n, n, '/', 'F', big(1:n, 1:n), made))
    call told('type', pmm3d_matrix(grid, 'd', n, n, '/', 'F', single, made))
    call told('sizes', pmm3d_matrix(grid, 'd', 8.0, n, '/', 'F', a, made))
    call told('padded', pmm3d_matrix(grid, 'd', n, n, '/', 'F', big(:, 1:n), made)) ! rows below the matrix
    call told('by rows', pmm3d_matrix(grid, 'd', 2*n, 4, '/', 'C', big(:, 1:4), made))
    call told('dimensions', pmm3d_matrix(grid, 'd', n, n, '/', 'F', cube, made))
    call told('limit', pmm3d_max_workspace(grid, 1.0))
    call told('for', pmm3d_grid_for(MPI_COMM_WORLD, 'd', n, n, 1.0, made))
    call told('for type', pmm3d_grid_for(MPI_COMM_WORLD, merge('i', 'd', rank == last), n, n, n, made))
    call told('box', pmm3d_box(grid, '/', n, n, tiny))
    box = 7
    call told('long', pmm3d_box(grid, '/', 2_c_int64_t**31, 1, box))
    right = right .and. all(box == [1, 0, 1, 0])
    if (rank == last) call told('few', pmm3d_matrix(grid, 'd', n, n, '/', 'F', small, made))
    if (rank /= last) call told('few', pmm3d_matrix(grid, 'd', n, n, '/', 'F', a, made))

    ! Factors of another type.
    call told('alpha', pmm3d_matmul('N', 'N', 1d0, z(1), z(1), (0d0, 0d0), z(2)))
    call told('beta', pmm3d_matmul('N', 'N', 1d0, m(1), m(2), 0.0, m(3)))
    call told('integer', pmm3d_plan_matmul('N', 'N', 1, m(1), m(2), 0d0, m(3), plan))
    call told('pgemm', pmm3d_pgemm(context, 'z', 'N', 'N', n, n, n, 1d0, x, 1, 1, desc, x, 1, 1, desc, (0d0, 0d0), y, &
                                   1, 1, desc))

    ! Arrays of another type, and boxes.
    call told('a', pmm3d_pgemm(context, 'd', 'N', 'N', n, n, n, 1d0, single, 1, 1, desc, b, 1, 1, desc, 0d0, c, 1, 1, &
                                desc))
    call told('moved', pmm3d_pgemr2d('d', n, n, a, 1, 1, desc, context, single, 1, 1, desc, context))
    call told('cyclic', pmm3d_from_block_cyclic(context, single, desc, m(3)))
    call told('to cyclic', pmm3d_plan_to_block_cyclic(m(3), context, x, desc, plan))
    call told('block', pmm3d_from_blocks(single, [1, n, 1, n], 'F', m(3)))
    call told('tiny', pmm3d_to_blocks(m(3), a, tiny, 'F'))

    ! Arrays of plans: an element of a work array is used in place, a section is refused.
    line = 1; line(1) = 3; b = 1
    call ok(pmm3d_plan_pgemm(context, 'd', 'N', 'N', n, n, n, 1d0, line(1), 1, 1, desc, b, 1, 1, desc, 0d0, c, 1, 1, &
                             desc, plans(1)))
    line(1) = 1; c = 0
    call ok(pmm3d_run(plans(1)))
    right = right .and. all(c == merge(n, 0, rank == 0))
    call ok(pmm3d_pgemm(context, 'd', 'N', 'N', n, n, n, 1d0, line(1), 1, 1, desc, b, 1, 1, desc, 0d0, c, 1, 1, desc))
    right = right .and. all(c == merge(n, 0, rank == 0))
    call told('gaps', pmm3d_plan_pgemm(context, 'd', 'N', 'N', n, n, n, 1d0, big(1:n, 1:n), 1, 1, desc, b, 1, 1, desc, &
                                       0d0, c, 1, 1, desc, plans(2)))
    call ok(pmm3d_plan_from_blocks(a, int([1, merge(n, 0, rank == 0), 1, n], c_int64_t), 'F', m(3), plans(2)))
    a = 4
    call ok(pmm3d_run(plans(2)))
    right = right .and. all(c == 4)
    call told('gaps at once', pmm3d_to_blocks(m(3), big(1:n, 1:n), [1, n, 1, n], 'F'))
    call ok(pmm3d_to_blocks(m(3), big(1, 1), [1, merge(n, 0, rank == 0), 1, n], 'F'))
    right = right .and. all(big(:, 1:4) == merge(4, 1, rank == 0)) .and. all(big(:, 5:) == 1)
    print "(i0, a, l1)", rank, " right ", right
    call ok(pmm3d_finalize())
    call MPI_Finalize(ierr)

contains

    subroutine told(name, code)
        character(len=*), intent(in) :: name
        integer, intent(in) :: code
        print "(i0, 1x, a, 1x, i0, 1x, i0, 1x, a)", rank, name, code, pmm3d_error_everywhere(), pmm3d_last_error()
    end subroutine

    subroutine ok(code)
        integer(c_int), intent(in) :: code
        if (code == PMM3D_OK) return
        print "(a)", pmm3d_last_error()
        call MPI_Abort(MPI_COMM_WORLD, 1, ierr)
    end subroutine
end program
